/* dbias where one of its elements belongs to several pairs: bias repeated over the batch, heads,
 * queries or keys. A task owns a tile of dbias and visits, in fixed order, every (b, h, query
 * block, key tile) that adds to it, recomputing dS: nothing of size T x S is kept, and no two tasks
 * write the same element. Sums are doubles: a repeated bias may add up millions of terms. */
#include "attention/attention_cpu_gradient.h"
#include "core/numbers.h"

/* Ranges that one owner covers: dimensions of [B, H, query blocks, key tiles]. */
typedef struct owner {
    int64_t first[4], last[4];
    bool repeats_query, repeats_key;
} owner;

static void owner_dimensions(const orch_attention_cpu_plan *plan, int64_t full[4], int64_t owned[4])
{
    const orch_attention *p = plan->p;
    full[0] = p->B;
    full[1] = p->H;
    full[2] = orch_ceil_div(p->T, plan->block_panels * PANEL);
    full[3] = orch_ceil_div(p->S, plan->block_keys);
    for (int i = 0; i < 4; i++) {
        owned[i] = p->bias_size[i] == 1 ? 1 : full[i];
    }
}

int64_t ORCH_K(attention_dbias_tasks)(const orch_attention_cpu_plan *plan)
{
    int64_t full[4], owned[4];
    owner_dimensions(plan, full, owned);
    return owned[0] * owned[1] * owned[2] * owned[3];
}

/* Adds dS of one panel, keys [j0, j1), to the owner's sums [lanes][block_keys]. */
static void add_to_owner(const owner *own, double *sums, int64_t block_keys, const panel *n,
                         int64_t index, const real *ds, int64_t j0, int64_t j1)
{
    for (int64_t j = j0; j < j1; j++) {
        const int64_t column = own->repeats_key ? 0 : j % block_keys;
        for (int lane = 0; lane < n->lanes; lane++) {
            const int64_t row = own->repeats_query ? 0 : index * PANEL + lane;
            sums[row * block_keys + column] += (double)ds[(j - j0) * PANEL + lane];
        }
    }
}

/* One (b, h, query block) against the owner's key tiles. */
static void visit(const orch_attention_cpu_plan *plan, const owner *own, gradient_state *state,
                  orch_attention_task *task)
{
    const orch_attention *p = plan->p;
    const int64_t left = task->cut.panels - task->block * plan->block_panels;
    const int64_t count = left < plan->block_panels ? left : plan->block_panels;
    gradient_start(plan, task, state, count);
    for (int64_t at_tile = own->first[3]; at_tile < own->last[3]; at_tile++) {
        const int64_t from = at_tile * plan->block_keys;
        const int64_t end = from + plan->block_keys;
        const int64_t to = end < task->sequence.S ? end : task->sequence.S;
        if (from >= to) {
            break;
        }
        const key_rows k = key_tile(p, task, &p->k, p->D, from, to, state->k);
        const key_rows v = key_tile(p, task, &p->v, p->E, from, to, state->v);
        for (int64_t n = 0; n < count; n++) {
            const panel *at = &state->panels[n];
            const int64_t j0 = at->lo > from ? at->lo : from, j1 = at->hi < to ? at->hi : to;
            if (j0 < j1) {
                const key_rows panel_k = {k.data + (j0 - from) * k.stride, k.stride};
                const key_rows panel_v = {v.data + (j0 - from) * v.stride, v.stride};
                panel_gradient(p, task, state, n, panel_k, panel_v, j0, j1, state->p, state->ds);
                add_to_owner(own, state->dbias, plan->block_keys, at, n, state->ds, j0, j1);
            }
        }
    }
}

static void store_owner(const orch_attention_cpu_plan *plan, const owner *own, const double *sums)
{
    const orch_attention *p = plan->p;
    const int64_t row0 = own->repeats_query ? 0 : own->first[2] * plan->block_panels * PANEL;
    const int64_t column0 = own->repeats_key ? 0 : own->first[3] * plan->block_keys;
    int64_t rows = p->bias_size[2] - row0, columns = p->bias_size[3] - column0;
    rows = rows < plan->block_panels * PANEL ? rows : plan->block_panels * PANEL;
    columns = columns < plan->block_keys ? columns : plan->block_keys;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = orch_row(&p->dbias, own->first[0], own->first[1], row0 + i);
        for (int64_t j = 0; j < columns; j++) {
            orch_element_store(p->dbias.dtype, p->dbias.data, at + (column0 + j) * p->dbias.column,
                               sums[i * plan->block_keys + j]);
        }
    }
}

void ORCH_K(attention_dbias)(const orch_attention_cpu_plan *plan, int64_t index, char *scratch)
{
    const orch_attention *p = plan->p;
    const int64_t block_rows = plan->block_panels * PANEL;
    gradient_state state;
    owner own = {.repeats_query = p->bias_size[2] == 1, .repeats_key = p->bias_size[3] == 1};
    int64_t full[4], owned[4];
    gradient_layout(plan, scratch, &state);
    owner_dimensions(plan, full, owned);
    for (int i = 3; i >= 0; i--) {
        const int64_t at = index % owned[i];
        index /= owned[i];
        own.first[i] = p->bias_size[i] == 1 ? 0 : at;
        own.last[i] = p->bias_size[i] == 1 ? full[i] : at + 1;
    }
    memset(state.dbias, 0, (size_t)(block_rows * plan->block_keys) * sizeof(double));
    for (int64_t b = own.first[0]; b < own.last[0] && orch_attention_has_queries(p); b++) {
        const orch_sequence s = orch_attention_sequence(p, b);
        for (int64_t h = own.first[1]; h < own.last[1]; h++) {
            /* One head per panel here: an owner may want one head only. */
            orch_attention_task task = {
                .b = b, .g = h / (p->H / p->G), .head_set = h % (p->H / p->G), .sequence = s};
            task.cut =
                (orch_attention_cut){.heads_per_panel = 1, .panels = orch_ceil_div(s.T, PANEL)};
            for (task.block = own.first[2]; task.block < own.last[2]; task.block++) {
                if (task.block * block_rows < s.T) {
                    visit(plan, &own, &state, &task);
                }
            }
        }
    }
    store_owner(plan, &own, state.dbias);
}
