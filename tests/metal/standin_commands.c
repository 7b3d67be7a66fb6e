/* Queues, command buffers, encoders: what is recorded, in which order it may be said. */
#include "standin.h"

#include <stdlib.h>

/* ---- Queues and command buffers -------------------------------------------------------------- */

id standin_device_new_queue(id self, SEL command)
{
    standin_lock();
    struct object *device = standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    struct queue *queue = NULL;
    if (!standin_fails(FAULT_queue)) {
        queue = standin_new(CLASS_MTLCommandQueue);
        queue->device = device;
        device->refs++; /* the host may use it as long as the queue lives */
    }
    standin_unlock();
    return (id)(void *)queue;
}

id standin_queue_device(id self, SEL command)
{
    const struct queue *queue =
        standin_expect(self, CLASS_MTLCommandQueue, standin_selector(command));
    return (id)(void *)queue->device;
}

id standin_queue_command_buffer(id self, SEL command)
{
    standin_lock();
    struct queue *queue = standin_expect(self, CLASS_MTLCommandQueue, standin_selector(command));
    struct commands *c = NULL;
    if (!standin_fails(FAULT_command_buffer)) {
        c = standin_new(CLASS_MTLCommandBuffer);
        c->queue = queue;
        standin_hold(queue);
    }
    standin_unlock();
    return standin_autorelease(c);
}

static struct commands *expect_commands(id self, SEL command)
{
    return standin_expect(self, CLASS_MTLCommandBuffer, standin_selector(command));
}

static id new_encoder(id self, SEL command, enum standin_class class)
{
    standin_lock();
    struct commands *c = expect_commands(self, command);
    if (c->status != ORCH_MTL_STATUS_NOT_ENQUEUED) {
        standin_stop("%s: the command buffer is committed", standin_selector(command));
    }
    if (c->open) {
        standin_stop("%s: another encoder is open", standin_selector(command));
    }
    struct encoder *e = NULL;
    if (!standin_fails(FAULT_encoder)) {
        e = standin_new(class);
        e->commands = c;
        standin_hold(c);
        c->open = e;
        if (class == CLASS_MTLComputeCommandEncoder) {
            e->state = calloc(1, sizeof *e->state);
        }
    }
    standin_unlock();
    return standin_autorelease(e);
}

id standin_commands_compute(id self, SEL command)
{
    return new_encoder(self, command, CLASS_MTLComputeCommandEncoder);
}

id standin_commands_blit(id self, SEL command)
{
    return new_encoder(self, command, CLASS_MTLBlitCommandEncoder);
}

void standin_commands_commit(id self, SEL command)
{
    standin_lock();
    struct commands *c = expect_commands(self, command);
    if (c->open) {
        standin_stop("commit: an encoder is open");
    }
    if (c->status != ORCH_MTL_STATUS_NOT_ENQUEUED) {
        standin_stop("commit: the command buffer is committed already");
    }
    c->status = ORCH_MTL_STATUS_COMMITTED;
    standin_hold(c);
    if (c->queue->last) {
        c->queue->last->next = c;
    } else {
        c->queue->first = c;
    }
    c->queue->last = c;
    standin_count(COUNT_command_buffers, 1);
    standin_unlock();
}

void standin_commands_wait(id self, SEL command)
{
    standin_lock();
    struct commands *c = expect_commands(self, command);
    if (c->status == ORCH_MTL_STATUS_NOT_ENQUEUED) {
        standin_stop("waitUntilCompleted: the command buffer is not committed: this waits forever");
    }
    standin_run_until(c);
    standin_unlock();
}

/* Someone who asks again and again does get an answer in the end. */
NSUInteger standin_commands_status(id self, SEL command)
{
    standin_lock();
    struct commands *c = expect_commands(self, command);
    if (c->status == ORCH_MTL_STATUS_COMMITTED && ++c->polls > 100) {
        standin_run_until(c);
    }
    NSUInteger status = c->status;
    standin_unlock();
    return status;
}

id standin_commands_error(id self, SEL command)
{
    const struct commands *c = expect_commands(self, command);
    return c->error ? standin_error("%s", c->error) : NULL;
}

double standin_commands_start_time(id self, SEL command)
{
    return expect_commands(self, command)->start;
}

double standin_commands_end_time(id self, SEL command)
{
    return expect_commands(self, command)->end;
}

void standin_queue_dying(struct queue *queue)
{
    while (queue->first) {
        standin_run_until(queue->first);
    }
}

void standin_commands_free(struct commands *c)
{
    standin_drop_operations(c);
    free(c->error);
    standin_drop(c->queue);
}

/* ---- Encoders -------------------------------------------------------------------------------- */

static struct encoder *expect_encoder(id self, SEL command, enum standin_class class)
{
    struct encoder *e = standin_expect(self, class, standin_selector(command));
    if (e->ended) {
        standin_stop("%s: the encoder has ended", standin_selector(command));
    }
    return e;
}

static struct encoder *expect_compute(id self, SEL command)
{
    return expect_encoder(self, command, CLASS_MTLComputeCommandEncoder);
}

static void end(struct encoder *e)
{
    e->ended = true;
    e->commands->open = NULL;
}

void standin_compute_end(id self, SEL command)
{
    end(expect_compute(self, command));
}

void standin_blit_end(id self, SEL command)
{
    end(expect_encoder(self, command, CLASS_MTLBlitCommandEncoder));
}

void standin_encoder_dying(struct encoder *e)
{
    if (!e->ended) {
        standin_stop("a %s is released before endEncoding", standin_class_name(e->object.class));
    }
}

void standin_encoder_free(struct encoder *e)
{
    if (e->state) {
        standin_drop_dispatch(e->state);
    }
    standin_drop(e->commands);
}

static void unbind(struct binding *b)
{
    if (b->buffer) {
        standin_drop(b->buffer);
    }
    free(b->bytes);
    *b = (struct binding){0};
}

void standin_drop_dispatch(struct dispatch *d)
{
    for (int i = 0; i < ORCH_MTL_MAX_BUFFERS; i++) {
        unbind(&d->bindings[i]);
    }
    if (d->pipeline) {
        standin_drop(d->pipeline);
    }
    free(d);
}

void standin_compute_set_pipeline(id self, SEL command, id pipeline)
{
    standin_lock();
    struct encoder *e = expect_compute(self, command);
    struct function *p =
        standin_expect(pipeline, CLASS_MTLComputePipelineState, standin_selector(command));
    standin_hold(p);
    if (e->state->pipeline) {
        standin_drop(e->state->pipeline);
    }
    e->state->pipeline = p;
    standin_unlock();
}

static struct binding *binding_at(struct encoder *e, NSUInteger index, const char *where)
{
    if (index >= ORCH_MTL_MAX_BUFFERS) {
        standin_stop("%s: index %lu, the limit is 30", where, index);
    }
    return &e->state->bindings[index];
}

void standin_compute_set_buffer(id self, SEL command, id buffer, NSUInteger offset,
                                NSUInteger index)
{
    const char *where = standin_selector(command);
    standin_lock();
    struct encoder *e = expect_compute(self, command);
    struct binding *b = binding_at(e, index, where);
    struct buffer *memory = buffer ? standin_expect(buffer, CLASS_MTLBuffer, where) : NULL;
    if (memory && offset >= memory->length) {
        standin_stop("%s: offset %lu of a buffer of %zu bytes, [[buffer(%lu)]]", where, offset,
                     memory->length, index);
    }
    if (memory) {
        standin_hold(memory);
    }
    unbind(b);
    *b = (struct binding){.buffer = memory, .offset = offset};
    standin_unlock();
}

void standin_compute_set_bytes(id self, SEL command, const void *bytes, NSUInteger length,
                               NSUInteger index)
{
    const char *where = standin_selector(command);
    standin_lock();
    struct encoder *e = expect_compute(self, command);
    struct binding *b = binding_at(e, index, where);
    if (!bytes || length == 0 || length > ORCH_MTL_MAX_BYTES) {
        standin_stop("%s: %lu bytes for [[buffer(%lu)]], the limit is 4096", where, length, index);
    }
    unbind(b);
    b->bytes = malloc(length);
    b->length = length;
    memcpy(b->bytes, bytes, length);
    standin_unlock();
}

void standin_compute_set_threadgroup_memory(id self, SEL command, NSUInteger length,
                                            NSUInteger index)
{
    struct encoder *e = expect_compute(self, command);
    if (index >= ORCH_MTL_MAX_BUFFERS || length % 16) {
        standin_stop(
            "%s: %lu bytes for [[threadgroup(%lu)]]: the length must be a multiple of 16, the "
            "index below 31",
            standin_selector(command), length, index);
    }
    e->state->threadgroup[index] = length;
}

void standin_compute_barrier(id self, SEL command, NSUInteger scope)
{
    expect_compute(self, command);
    if (scope == 0 || scope > 7) {
        standin_stop("%s: %lu is not a scope", standin_selector(command), scope);
    }
}

static struct operation *add(struct encoder *e)
{
    struct commands *c = e->commands;
    if (c->count == c->room) {
        c->room = c->room * 2 + 8;
        c->operations = realloc(c->operations, c->room * sizeof *c->operations);
    }
    struct operation *o = &c->operations[c->count++];
    *o = (struct operation){0};
    return o;
}

/* A dispatch keeps what is bound now; later bindings are for later dispatches. */
static struct dispatch *copy_state(const struct dispatch *state)
{
    struct dispatch *d = malloc(sizeof *d);
    *d = *state;
    standin_hold(d->pipeline);
    for (int i = 0; i < ORCH_MTL_MAX_BUFFERS; i++) {
        struct binding *b = &d->bindings[i];
        if (b->buffer) {
            standin_hold(b->buffer);
        } else if (b->bytes) {
            b->bytes = malloc(b->length);
            memcpy(b->bytes, state->bindings[i].bytes, b->length);
        }
    }
    return d;
}

void standin_compute_dispatch(id self, SEL command, MTLSize groups, MTLSize threads)
{
    standin_lock();
    struct encoder *e = expect_compute(self, command);
    if (!e->state->pipeline) {
        standin_stop("%s: no pipeline is set", standin_selector(command));
    }
    e->state->groups = groups;
    e->state->threads = threads;
    standin_check_dispatch(e->state);
    add(e)->dispatch = copy_state(e->state);
    standin_count(COUNT_dispatches, 1);
    standin_unlock();
}

static struct buffer *expect_range(id buffer, NSUInteger offset, NSUInteger size, const char *where)
{
    struct buffer *b = standin_expect(buffer, CLASS_MTLBuffer, where);
    if (size == 0 || offset > b->length || size > b->length - offset) {
        standin_stop("%s: bytes %lu to %lu of a buffer of %zu", where, offset, offset + size,
                     b->length);
    }
    if (offset % 4 || size % 4) {
        standin_stop("%s: offset %lu and size %lu must be multiples of 4", where, offset, size);
    }
    standin_hold(b);
    return b;
}

void standin_blit_copy(id self, SEL command, id from, NSUInteger from_offset, id to,
                       NSUInteger to_offset, NSUInteger size)
{
    const char *where = standin_selector(command);
    standin_lock();
    struct encoder *e = expect_encoder(self, command, CLASS_MTLBlitCommandEncoder);
    struct buffer *a = expect_range(from, from_offset, size, where);
    struct buffer *b = expect_range(to, to_offset, size, where);
    if (a == b && from_offset < to_offset + size && to_offset < from_offset + size) {
        standin_stop("%s: the ranges overlap", where);
    }
    *add(e) = (struct operation){
        .from = a, .to = b, .from_offset = from_offset, .to_offset = to_offset, .size = size};
    standin_count(COUNT_blits, 1);
    standin_unlock();
}

void standin_blit_fill(id self, SEL command, id buffer, NSRange range, uint8_t value)
{
    standin_lock();
    struct encoder *e = expect_encoder(self, command, CLASS_MTLBlitCommandEncoder);
    struct buffer *b =
        expect_range(buffer, range.location, range.length, standin_selector(command));
    *add(e) = (struct operation){
        .to = b, .to_offset = range.location, .size = range.length, .value = value};
    standin_count(COUNT_blits, 1);
    standin_unlock();
}
