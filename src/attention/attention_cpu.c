/* The CPU backend of attention: block sizes, scratch, and how the work is shared out. Whatever
 * decides the order of a sum follows from the shapes of one batch element, never from the number of
 * threads or the batch size, so that neither changes a bit of the result. */
#include "attention/attention_cpu.h"

#include "core/context.h"
#include "core/numbers.h"
#include "core/threads.h"

static const orch_attention_cpu_kernels *choose_kernels(orch_isa isa, orchard_dtype dtype)
{
    const bool f64 = dtype == ORCHARD_F64;
    switch (isa) {
#if defined(ORCH_HAVE_AVX2)
    case ORCH_ISA_AVX2:
        return f64 ? &orch_cpu_attention_avx2_f64 : &orch_cpu_attention_avx2_f32;
#endif
#if defined(ORCH_HAVE_NEON)
    case ORCH_ISA_NEON:
        return f64 ? &orch_cpu_attention_neon_f64 : &orch_cpu_attention_neon_f32;
#endif
    default:
        return f64 ? &orch_cpu_attention_scalar_f64 : &orch_cpu_attention_scalar_f32;
    }
}

/* ---- Cutting up the work --------------------------------------------------------------------- */

/* A block of queries walks over the keys together. Forward wants it tall, to read K and V seldom,
 * and as its panels do not mix, it may be lower where that is needed to keep all threads busy. In
 * backward the block is part of the order in which dk and dv are summed; P and dS of block x tile
 * must fit the second-level cache. */
#define FORWARD_PANELS 16
#define BACKWARD_PANELS 6

/* Few queries against many keys, as in decoding: the keys are split, at most this often. */
#define SPLIT_ROWS 64
#define SPLIT_KEYS 512
#define MAX_SPLITS 32

/* Keys of a tile, multiples of 12: whole register tiles and whole Philox quads. */
static int64_t forward_keys(int64_t size)
{
    return size <= 128 ? 192 : size <= 256 ? 96 : 48;
}

static int64_t backward_keys(int64_t size)
{
    return size <= 128 ? 96 : size <= 256 ? 48 : 24;
}

static orch_attention_cut cut_queries(const orch_attention_cpu_plan *plan, const orch_sequence *s)
{
    const int64_t group = plan->p->G ? plan->p->H / plan->p->G : 0;
    orch_attention_cut cut = {.heads_per_panel = 1, .splits = 1};
    if (s->T > 0 && s->T < plan->panel) {
        cut.heads_per_panel = plan->panel / s->T < group ? plan->panel / s->T : group;
    }
    cut.head_sets = cut.heads_per_panel ? orch_ceil_div(group, cut.heads_per_panel) : 0;
    cut.panels = orch_ceil_div(s->T, plan->panel);
    cut.blocks = orch_ceil_div(cut.panels, plan->block_panels);
    return cut;
}

static orch_attention_cut cut_forward(const orch_attention_cpu_plan *plan, const orch_sequence *s)
{
    orch_attention_cut cut = cut_queries(plan, s);
    if (cut.head_sets * cut.panels * plan->panel <= SPLIT_ROWS && s->S >= 2 * SPLIT_KEYS) {
        cut.splits = s->S / SPLIT_KEYS < MAX_SPLITS ? s->S / SPLIT_KEYS : MAX_SPLITS;
    }
    return cut;
}

/* With few key heads there is too little to share out: dk and dv are then summed in up to four
 * copies. */
static orch_attention_cut cut_backward(const orch_attention_cpu_plan *plan, const orch_sequence *s)
{
    orch_attention_cut cut = cut_queries(plan, s);
    const int64_t copies = plan->p->G >= 8 ? 1 : plan->p->G >= 4 ? 2 : 4;
    const int64_t blocks = cut.head_sets * cut.blocks;
    cut.splits = blocks < 1 ? 1 : blocks < copies ? blocks : copies;
    return cut;
}

/* The batch element that owns task `index`. */
static int64_t find_batch(const int64_t *first_task, int64_t B, int64_t index)
{
    int64_t low = 0, high = B;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (first_task[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static void plan_blocks(orch_attention_cpu_plan *plan, const orch_call *call,
                        const orch_attention_cpu_kernels *kernels, int64_t panels, int64_t keys)
{
    *plan = (orch_attention_cpu_plan){
        .p = call->problem,
        .threads = call->ctx->threads,
        .panel = kernels->panel,
        .real_bytes = kernels->real_bytes,
        .block_panels = panels,
        .block_keys = keys,
    };
}

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* The next part of scratch; *at goes on behind it. */
static char *take(char **at, size_t bytes)
{
    char *part = *at;
    *at += bytes;
    return part;
}

/* The n-th of `heads` heads in the order of work. Heads may lie beside each other in every row of
 * memory: threads that take them by turns should be far apart, or cores pull cache lines out of
 * each other's hands. */
static int64_t head_at(const orch_attention_cpu_plan *plan, int64_t heads, int64_t n)
{
    const int64_t share = heads / plan->threads;
    return n < share * plan->threads ? n % plan->threads * share + n / plan->threads : n;
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* Counts tasks and partial results, and notes where each batch element's begin if there is room to.
 */
static void count_forward_tasks(orch_attention_cpu_plan *plan, int64_t *partials)
{
    const orch_attention *p = plan->p;
    plan->tasks = *partials = 0;
    for (int64_t b = 0; b < p->B; b++) {
        const orch_sequence s = orch_attention_sequence(p, b);
        const orch_attention_cut cut = cut_forward(plan, &s);
        if (plan->first_task) {
            plan->first_task[b] = plan->tasks;
            plan->first_partial[b] = *partials;
        }
        plan->tasks += p->G * cut.head_sets * cut.blocks * cut.splits;
        *partials += cut.splits > 1 ? p->G * cut.head_sets * cut.panels * cut.splits : 0;
    }
}

typedef struct forward_job {
    const orch_attention_cpu_kernels *kernels;
    orch_attention_cpu_plan plan;
    size_t batch_bytes, partial_bytes; /* of first_task and first_partial each; of all partials */
} forward_job;

_Static_assert(sizeof(forward_job) <= ORCH_PLAN_BYTES, "grow ORCH_PLAN_BYTES");

/* Everything but where in scratch it will be. */
static const char *plan_forward(const orch_call *call, orch_plan *answer)
{
    const orch_attention *p = call->problem;
    const int64_t threads = call->ctx->threads;
    forward_job *job = (forward_job *)answer->own;
    orch_attention_cpu_plan *plan = &job->plan;
    int64_t partials;
    if (!orch_attention_has_queries(p)) {
        return NULL;
    }
    job->kernels = choose_kernels(call->ctx->isa, p->dtype);
    plan_blocks(plan, call, job->kernels, FORWARD_PANELS, forward_keys(orch_max(p->D, p->E)));
    count_forward_tasks(plan, &partials);
    while (threads > 1 && plan->tasks < 4 * threads && plan->block_panels > 2) {
        plan->block_panels /= 2;
        count_forward_tasks(plan, &partials);
    }
    plan->partial_bytes = (size_t)((p->E + 2) * plan->panel * plan->real_bytes);
    plan->worker_bytes = round_up(job->kernels->forward_bytes(plan));
    job->batch_bytes = round_up((size_t)p->B * sizeof(int64_t));
    job->partial_bytes = round_up((size_t)partials * plan->partial_bytes);
    answer->scratch_bytes =
        2 * job->batch_bytes + job->partial_bytes + plan->worker_bytes * (size_t)threads;
    return NULL;
}

static void place_forward(forward_job *job, char *scratch)
{
    orch_attention_cpu_plan *plan = &job->plan;
    int64_t partials;
    plan->first_task = (int64_t *)take(&scratch, job->batch_bytes);
    plan->first_partial = (int64_t *)take(&scratch, job->batch_bytes);
    plan->partials = take(&scratch, job->partial_bytes);
    plan->worker_scratch = scratch;
    count_forward_tasks(plan, &partials);
}

static orch_attention_task forward_task_at(const orch_attention_cpu_plan *plan, int64_t index)
{
    orch_attention_task task = {.b = find_batch(plan->first_task, plan->p->B, index)};
    task.sequence = orch_attention_sequence(plan->p, task.b);
    task.cut = cut_forward(plan, &task.sequence);
    int64_t rest = index - plan->first_task[task.b];
    task.split = rest % task.cut.splits;
    rest /= task.cut.splits;
    /* Later blocks of a causal mask are longer: they go first. */
    task.block = task.cut.blocks - 1 - rest % task.cut.blocks;
    rest = head_at(plan, plan->p->G * task.cut.head_sets, rest / task.cut.blocks);
    task.head_set = rest % task.cut.head_sets;
    task.g = rest / task.cut.head_sets;
    return task;
}

static void forward_task(int64_t index, int32_t worker, void *arg)
{
    forward_job *job = arg;
    const orch_attention_task task = forward_task_at(&job->plan, index);
    job->kernels->forward(&job->plan, &task,
                          job->plan.worker_scratch + job->plan.worker_bytes * (size_t)worker);
}

static void combine_task(int64_t index, int32_t worker, void *arg)
{
    forward_job *job = arg;
    const orch_attention_task task = forward_task_at(&job->plan, index);
    (void)worker;
    if (task.cut.splits > 1 && task.split == 0) {
        job->kernels->combine(&job->plan, &task);
    }
}

static orchard_status run_forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    forward_job *job = (forward_job *)plan->own;
    if (!orch_attention_has_queries(call->problem)) {
        return ORCHARD_OK;
    }
    place_forward(job, scratch);
    orch_parallel(call->ctx, job->plan.tasks, forward_task, job);
    if (job->partial_bytes) {
        orch_parallel(call->ctx, job->plan.tasks, combine_task, job);
    }
    return ORCHARD_OK;
}

const orch_slot orch_attention_forward_cpu = {.plan = plan_forward, .run = run_forward};

/* ---- Backward -------------------------------------------------------------------------------- */

typedef struct backward_job {
    const orch_attention_cpu_kernels *kernels;
    orch_attention_cpu_plan plan;
    int64_t splits;    /* largest of all batch elements */
    int64_t wave;      /* key heads (b, g) whose sums exist at once, where there are splits */
    int64_t wave_from; /* the current wave's first */
    size_t sums_bytes, sink_bytes; /* of all sums, of all sink_terms */
} backward_job;

_Static_assert(sizeof(backward_job) <= ORCH_PLAN_BYTES, "grow ORCH_PLAN_BYTES");

/* Whether each element of dbias belongs to one pair: every size is full, or there is only one to
 * repeat. */
static bool dbias_is_direct(const orch_attention *p)
{
    const int64_t full[4] = {p->B, p->H, p->T, p->S};
    for (int i = 0; i < 4; i++) {
        if (p->bias_size[i] != full[i]) {
            return false;
        }
    }
    /* Shorter sequences leave rows that no task visits: the owners' pass writes those too. */
    return p->dbias.present && !orch_tensor_present(&p->cu_seqlens_q);
}

/* Whether tasks over (b, g) have anything to write. */
static bool visits_batch(const orch_attention *p, const orch_attention_cpu_plan *plan)
{
    return (orch_attention_has_queries(p) &&
            (p->dq.present || p->dsinks.present || plan->dbias_direct)) ||
           (orch_attention_has_keys(p) && (p->dk.present || p->dv.present));
}

/* As forward's. */
static const char *plan_backward(const orch_call *call, orch_plan *answer)
{
    const orch_attention *p = call->problem;
    const int64_t threads = call->ctx->threads;
    backward_job *job = (backward_job *)answer->own;
    orch_attention_cpu_plan *plan = &job->plan;
    if (p->dsinks.present && p->H > 0 && p->total_t > (INT64_C(1) << 48) / p->H) {
        return "more rows than the terms of dsinks have room for";
    }
    job->kernels = choose_kernels(call->ctx->isa, p->dtype);
    plan_blocks(plan, call, job->kernels, BACKWARD_PANELS, backward_keys(orch_max(p->D, p->E)));
    plan->dbias_direct = dbias_is_direct(p);
    const int64_t vector = plan->panel / 2;
    plan->width_k = orch_ceil_div(p->D, vector) * vector;
    plan->width_v = orch_ceil_div(p->E, vector) * vector;
    job->splits = 1;
    const int64_t batch = visits_batch(p, plan) ? p->B : 0;
    for (int64_t b = 0; b < batch; b++) {
        const orch_sequence s = orch_attention_sequence(p, b);
        const orch_attention_cut cut = cut_backward(plan, &s);
        job->splits = cut.splits > job->splits ? cut.splits : job->splits;
        plan->sums_rows = s.S > plan->sums_rows ? s.S : plan->sums_rows;
    }
    plan->sums_bytes = (int64_t)round_up(
        (size_t)(plan->sums_rows * (plan->width_k + plan->width_v) * plan->real_bytes));
    job->wave = orch_ceil_div(2 * threads, job->splits);
    job->wave = job->wave < p->B * p->G ? job->wave : p->B * p->G;
    job->sums_bytes =
        (size_t)plan->sums_bytes * (size_t)(job->splits == 1 ? threads : job->wave * job->splits);
    job->sink_bytes =
        p->dsinks.present ? round_up((size_t)(p->H * p->total_t * plan->real_bytes)) : 0;
    plan->worker_bytes = round_up(job->kernels->backward_bytes(plan));
    answer->scratch_bytes =
        job->sums_bytes + job->sink_bytes + plan->worker_bytes * (size_t)threads;
    return NULL;
}

static orch_attention_task backward_task_at(const orch_attention_cpu_plan *plan, int64_t pair,
                                            int64_t split)
{
    const int64_t G = plan->p->G;
    orch_attention_task task = {.b = pair / G, .g = head_at(plan, G, pair % G), .split = split};
    task.sequence = orch_attention_sequence(plan->p, task.b);
    task.cut = cut_backward(plan, &task.sequence);
    return task;
}

/* Rows of k that belong to the batch element, padding included. */
static int64_t key_rows_of(const orch_attention *p, const orch_attention_task *task)
{
    return orch_tensor_present(&p->cu_seqlens_k)
               ? orch_length_at(&p->cu_seqlens_k, task->b + 1) - task->sequence.row_k
               : p->S;
}

static char *worker_scratch(const backward_job *job, int32_t worker)
{
    return job->plan.worker_scratch + job->plan.worker_bytes * (size_t)worker;
}

/* No splits: a task does all of (b, g), with sums of its worker's. */
static void backward_whole(int64_t pair, int32_t worker, void *arg)
{
    backward_job *job = arg;
    const orch_attention_task task = backward_task_at(&job->plan, pair, 0);
    void *sums = job->plan.sums + job->plan.sums_bytes * worker;
    job->kernels->backward(&job->plan, &task, worker_scratch(job, worker), sums);
    job->kernels->store_sums(&job->plan, &task, sums, 1, 0, key_rows_of(job->plan.p, &task));
}

static void backward_split(int64_t index, int32_t worker, void *arg)
{
    backward_job *job = arg;
    const orch_attention_task task =
        backward_task_at(&job->plan, job->wave_from + index / job->splits, index % job->splits);
    if (task.split < task.cut.splits) {
        job->kernels->backward(&job->plan, &task, worker_scratch(job, worker),
                               job->plan.sums + job->plan.sums_bytes * index);
    }
}

/* Each (b, g) is stored in as many pieces as there are splits, so that all threads help. */
static void store_split(int64_t index, int32_t worker, void *arg)
{
    backward_job *job = arg;
    const int64_t place = index / job->splits, piece = index % job->splits;
    const orch_attention_task task = backward_task_at(&job->plan, job->wave_from + place, 0);
    const int64_t rows = key_rows_of(job->plan.p, &task);
    (void)worker;
    job->kernels->store_sums(
        &job->plan, &task, job->plan.sums + job->plan.sums_bytes * place * job->splits,
        task.cut.splits, rows * piece / job->splits, rows * (piece + 1) / job->splits);
}

static void dbias_task(int64_t index, int32_t worker, void *arg)
{
    backward_job *job = arg;
    job->kernels->dbias(&job->plan, index, worker_scratch(job, worker));
}

static void dsinks_task(int64_t h, int32_t worker, void *arg)
{
    backward_job *job = arg;
    (void)worker;
    job->kernels->dsinks(&job->plan, h);
}

static orchard_status run_backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_attention *p = call->problem;
    const int64_t pairs = p->B * p->G;
    backward_job *job = (backward_job *)plan->own;
    char *at = scratch;
    job->plan.sums = take(&at, job->sums_bytes);
    job->plan.sink_terms = take(&at, job->sink_bytes);
    job->plan.worker_scratch = at;
    if (visits_batch(p, &job->plan)) {
        if (job->splits == 1) {
            orch_parallel(call->ctx, pairs, backward_whole, job);
        }
        for (job->wave_from = 0; job->splits > 1 && job->wave_from < pairs;
             job->wave_from += job->wave) {
            const int64_t tasks = orch_min(pairs - job->wave_from, job->wave) * job->splits;
            orch_parallel(call->ctx, tasks, backward_split, job);
            orch_parallel(call->ctx, tasks, store_split, job);
        }
    }
    if (p->dbias.present && !job->plan.dbias_direct) {
        orch_parallel(call->ctx, job->kernels->dbias_tasks(&job->plan), dbias_task, job);
    }
    if (p->dsinks.present) {
        orch_parallel(call->ctx, p->H, dsinks_task, job);
    }
    return ORCHARD_OK;
}

const orch_slot orch_attention_backward_cpu = {.plan = plan_backward, .run = run_backward};
