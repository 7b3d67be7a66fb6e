/* The binary interface, pinned: size and offset of every public field and the value of every public
 * constant, as programs and ctypes structs built against 0.1.0 have them. Never change a number
 * here; a new field goes to the end of its struct and adds a line. */
#include <orchard.h>

#include "check.h"

#if UINTPTR_MAX != UINT64_MAX
#error "the numbers below are those of 64-bit machines"
#endif

typedef struct row {
    const char *struct_name, *field; /* field NULL: the struct as a whole */
    size_t offset, size, expected_offset, expected_size;
} row;

#define STRUCT(type, size) {#type, NULL, 0, sizeof(type), 0, size}
#define FIELD(type, field, offset, size) \
    {#type, #field, offsetof(type, field), sizeof(((type *)0)->field), offset, size}

static const row rows[] = {
    STRUCT(orchard_tensor, 160),
    FIELD(orchard_tensor, data, 0, 8),
    FIELD(orchard_tensor, buffer, 8, 8),
    FIELD(orchard_tensor, offset, 16, 8),
    FIELD(orchard_tensor, dtype, 24, 4),
    FIELD(orchard_tensor, rank, 28, 4),
    FIELD(orchard_tensor, size, 32, 64),
    FIELD(orchard_tensor, stride, 96, 64),
    STRUCT(orchard_ctx_opts, 80),
    FIELD(orchard_ctx_opts, threads, 0, 4),
    FIELD(orchard_ctx_opts, strict, 4, 4),
    FIELD(orchard_ctx_opts, backend, 8, 8),
    FIELD(orchard_ctx_opts, cpu, 16, 8),
    FIELD(orchard_ctx_opts, alloc, 24, 8),
    FIELD(orchard_ctx_opts, alloc_user, 32, 8),
    FIELD(orchard_ctx_opts, parallel_for, 40, 8),
    FIELD(orchard_ctx_opts, metal_device, 48, 8),
    FIELD(orchard_ctx_opts, metal_queue, 56, 8),
    FIELD(orchard_ctx_opts, opencl_context, 64, 8),
    FIELD(orchard_ctx_opts, opencl_queue, 72, 8),
    STRUCT(orchard_device_info, 208),
    FIELD(orchard_device_info, name, 0, 80),
    FIELD(orchard_device_info, driver, 80, 80),
    FIELD(orchard_device_info, is_cpu, 160, 4),
    FIELD(orchard_device_info, group_threads, 164, 4),
    FIELD(orchard_device_info, simd_width, 168, 4),
    FIELD(orchard_device_info, matrix, 172, 4),
    FIELD(orchard_device_info, local_bytes, 176, 8),
    FIELD(orchard_device_info, buffer_bytes, 184, 8),
    FIELD(orchard_device_info, memory_bytes, 192, 8),
    FIELD(orchard_device_info, wrap_alignment, 200, 8),
    STRUCT(orchard_device_entry, 464),
    FIELD(orchard_device_entry, info, 0, 208),
    FIELD(orchard_device_entry, platform, 208, 80),
    FIELD(orchard_device_entry, version, 288, 80),
    FIELD(orchard_device_entry, platform_number, 368, 4),
    FIELD(orchard_device_entry, number, 372, 4),
    FIELD(orchard_device_entry, chosen, 376, 4),
    FIELD(orchard_device_entry, remark, 380, 80),
    STRUCT(orchard_memory_counts, 32),
    FIELD(orchard_memory_counts, direct, 0, 8),
    FIELD(orchard_memory_counts, wrapped, 8, 8),
    FIELD(orchard_memory_counts, staged, 16, 8),
    FIELD(orchard_memory_counts, staged_bytes, 24, 8),
    STRUCT(orchard_explanation, 160),
    FIELD(orchard_explanation, backend, 0, 8),
    FIELD(orchard_explanation, cpu, 8, 8),
    FIELD(orchard_explanation, scratch_bytes, 16, 8),
    FIELD(orchard_explanation, asked, 24, 4),
    FIELD(orchard_explanation, name, 32, 64),
    FIELD(orchard_explanation, reason, 96, 64),
    STRUCT(orchard_report_line, 32),
    FIELD(orchard_report_line, op, 0, 8),
    FIELD(orchard_report_line, backend, 8, 8),
    FIELD(orchard_report_line, reason, 16, 8),
    FIELD(orchard_report_line, count, 24, 8),
    STRUCT(orchard_launch, 88),
    FIELD(orchard_launch, kernel, 0, 8),
    FIELD(orchard_launch, source, 8, 40),
    FIELD(orchard_launch, groups, 48, 24),
    FIELD(orchard_launch, threads, 72, 4),
    FIELD(orchard_launch, int_count, 76, 4),
    FIELD(orchard_launch, ints, 80, 8),
    STRUCT(orchard_launches, 72),
    FIELD(orchard_launches, reason, 0, 8),
    FIELD(orchard_launches, count, 8, 4),
    FIELD(orchard_launches, operand_count, 12, 4),
    FIELD(orchard_launches, scratch_count, 16, 4),
    FIELD(orchard_launches, int_count, 20, 4),
    FIELD(orchard_launches, float_count, 24, 4),
    FIELD(orchard_launches, launch, 32, 8),
    FIELD(orchard_launches, operand, 40, 8),
    FIELD(orchard_launches, scratch_bytes, 48, 8),
    FIELD(orchard_launches, ints, 56, 8),
    FIELD(orchard_launches, floats, 64, 8),
    STRUCT(orchard_attention, 1848),
    FIELD(orchard_attention, q, 0, 160),
    FIELD(orchard_attention, k, 160, 160),
    FIELD(orchard_attention, v, 320, 160),
    FIELD(orchard_attention, bias, 480, 160),
    FIELD(orchard_attention, mask, 640, 160),
    FIELD(orchard_attention, alibi, 800, 160),
    FIELD(orchard_attention, sinks, 960, 160),
    FIELD(orchard_attention, key_lengths, 1120, 160),
    FIELD(orchard_attention, cu_seqlens_q, 1280, 160),
    FIELD(orchard_attention, cu_seqlens_k, 1440, 160),
    FIELD(orchard_attention, max_t, 1600, 8),
    FIELD(orchard_attention, max_s, 1608, 8),
    FIELD(orchard_attention, scale, 1616, 8),
    FIELD(orchard_attention, has_scale, 1624, 4),
    FIELD(orchard_attention, causal, 1628, 4),
    FIELD(orchard_attention, align, 1632, 4),
    FIELD(orchard_attention, has_window, 1636, 4),
    FIELD(orchard_attention, window_left, 1640, 8),
    FIELD(orchard_attention, window_right, 1648, 8),
    FIELD(orchard_attention, softcap, 1656, 8),
    FIELD(orchard_attention, dropout, 1664, 8),
    FIELD(orchard_attention, seed, 1672, 8),
    FIELD(orchard_attention, dropout_offset, 1680, 4),
    FIELD(orchard_attention, lse_rest, 1688, 160),
    STRUCT(orchard_attention_forward_args, 2168),
    FIELD(orchard_attention_forward_args, out, 0, 160),
    FIELD(orchard_attention_forward_args, lse, 160, 160),
    FIELD(orchard_attention_forward_args, attention, 320, 1848),
    STRUCT(orchard_attention_backward_args, 3288),
    FIELD(orchard_attention_backward_args, dq, 0, 160),
    FIELD(orchard_attention_backward_args, dk, 160, 160),
    FIELD(orchard_attention_backward_args, dv, 320, 160),
    FIELD(orchard_attention_backward_args, dbias, 480, 160),
    FIELD(orchard_attention_backward_args, dsinks, 640, 160),
    FIELD(orchard_attention_backward_args, dout, 800, 160),
    FIELD(orchard_attention_backward_args, dlse, 960, 160),
    FIELD(orchard_attention_backward_args, out, 1120, 160),
    FIELD(orchard_attention_backward_args, lse, 1280, 160),
    FIELD(orchard_attention_backward_args, attention, 1440, 1848),
    STRUCT(orchard_replay_output, 72),
    FIELD(orchard_replay_output, name, 0, 16),
    FIELD(orchard_replay_output, elements, 16, 8),
    FIELD(orchard_replay_output, deviation, 24, 8),
    FIELD(orchard_replay_output, share, 32, 8),
    FIELD(orchard_replay_output, recorded_deviation, 40, 8),
    FIELD(orchard_replay_output, recorded_share, 48, 8),
    FIELD(orchard_replay_output, from_recorded, 56, 8),
    FIELD(orchard_replay_output, differing, 64, 8),
    STRUCT(orchard_replay_result, 4744),
    FIELD(orchard_replay_result, op, 0, 32),
    FIELD(orchard_replay_result, backend, 32, 16),
    FIELD(orchard_replay_result, version, 48, 16),
    FIELD(orchard_replay_result, output_count, 64, 4),
    FIELD(orchard_replay_result, output, 72, 576),
    FIELD(orchard_replay_result, story, 648, 4096),
};

enum { ROWS = sizeof rows / sizeof *rows };

static void every_field_is_where_it_was(void)
{
    for (int i = 0; i < ROWS; i++) {
        const row *r = &rows[i];
        if (r->offset != r->expected_offset || r->size != r->expected_size) {
            CHECK_FAIL("%s.%s is at %zu with %zu bytes, expected at %zu with %zu", r->struct_name,
                       r->field ? r->field : "(all)", r->offset, r->size, r->expected_offset,
                       r->expected_size);
        } else {
            check_passed++;
        }
    }
}

/* The table has every field: between two lines there is room for padding only. */
static void no_field_is_forgotten(void)
{
    for (int i = 0; i < ROWS; i++) {
        const int last = i + 1 == ROWS || !rows[i + 1].field;
        if (!rows[i].field) {
            CHECK_INT(rows[i + 1].offset, 0);
            continue;
        }
        size_t struct_size = 0;
        for (int at = i; at >= 0 && !struct_size; at--) {
            struct_size = rows[at].field ? 0 : rows[at].size;
        }
        const size_t end = rows[i].offset + rows[i].size,
                     next = last ? struct_size : rows[i + 1].offset;
        CHECK(next == end || (next == end + 4 && end % 8 == 4));
    }
}

static const struct {
    const char *name;
    int value, expected;
} values[] = {
#define VALUE(name, expected) {#name, name, expected}
    VALUE(ORCHARD_OK, 0),
    VALUE(ORCHARD_ERROR_ARGUMENT, -1),
    VALUE(ORCHARD_ERROR_SHAPE, -2),
    VALUE(ORCHARD_ERROR_DTYPE, -3),
    VALUE(ORCHARD_ERROR_LAYOUT, -4),
    VALUE(ORCHARD_ERROR_UNSUPPORTED, -5),
    VALUE(ORCHARD_ERROR_MEMORY, -6),
    VALUE(ORCHARD_ERROR_DEVICE, -7),
    VALUE(ORCHARD_ERROR_COMPILE, -8),
    VALUE(ORCHARD_ERROR_IO, -9),
    VALUE(ORCHARD_ERROR_INTERNAL, -10),
    VALUE(ORCHARD_DTYPE_NONE, 0),
    VALUE(ORCHARD_F64, 1),
    VALUE(ORCHARD_F32, 2),
    VALUE(ORCHARD_F16, 3),
    VALUE(ORCHARD_BF16, 4),
    VALUE(ORCHARD_I64, 5),
    VALUE(ORCHARD_I32, 6),
    VALUE(ORCHARD_I16, 7),
    VALUE(ORCHARD_I8, 8),
    VALUE(ORCHARD_U8, 9),
    VALUE(ORCHARD_BOOL, 10),
    VALUE(ORCHARD_STORAGE_ANY, 0),
    VALUE(ORCHARD_STORAGE_HOST, 1),
    VALUE(ORCHARD_STORAGE_SHARED, 2),
    VALUE(ORCHARD_STORAGE_PRIVATE, 3),
    VALUE(ORCHARD_MAX_RANK, 8),
    VALUE(ORCHARD_MAX_BACKENDS, 8),
    VALUE(ORCHARD_MAX_OUTPUTS, 8),
    VALUE(ORCHARD_SOURCE_PIECES, 5),
    VALUE(ORCHARD_TOP_LEFT, 0),
    VALUE(ORCHARD_BOTTOM_RIGHT, 1)};

enum { VALUES = sizeof values / sizeof *values };

static void constants(void)
{
    for (int i = 0; i < VALUES; i++) {
        if (values[i].value != values[i].expected) {
            CHECK_FAIL("%s is %d, expected %d", values[i].name, values[i].value,
                       values[i].expected);
        } else {
            check_passed++;
        }
    }
}

static void names(void)
{
    static const struct {
        orchard_dtype dtype;
        const char *name;
        size_t size;
    } dtypes[] = {{ORCHARD_F64, "f64", 8},   {ORCHARD_F32, "f32", 4}, {ORCHARD_F16, "f16", 2},
                  {ORCHARD_BF16, "bf16", 2}, {ORCHARD_I64, "i64", 8}, {ORCHARD_I32, "i32", 4},
                  {ORCHARD_I16, "i16", 2},   {ORCHARD_I8, "i8", 1},   {ORCHARD_U8, "u8", 1},
                  {ORCHARD_BOOL, "bool", 1}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        CHECK_STRING(orchard_dtype_name(dtypes[i].dtype), dtypes[i].name);
        CHECK_INT(orchard_dtype_size(dtypes[i].dtype), dtypes[i].size);
    }
    static const char *const statuses[] = {"ok",      "argument",    "shape",   "dtype",
                                           "layout",  "unsupported", "memory",  "device",
                                           "compile", "io",          "internal"};
    for (int i = 0; i < 11; i++) {
        CHECK_STRING(orchard_status_name((orchard_status)-i), statuses[i]);
    }
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", ORCHARD_VERSION_MAJOR, ORCHARD_VERSION_MINOR,
             ORCHARD_VERSION_PATCH);
    CHECK_STRING(orchard_version(), version);
}

static void tensor_helpers(void)
{
    float data[24] = {0};
    const orchard_tensor t = ORCHARD_TENSOR(data, ORCHARD_F32, 2, 3, 4);
    CHECK(t.data == data && t.rank == 3 && t.dtype == ORCHARD_F32 && !t.buffer && !t.offset);
    CHECK(t.size[0] == 2 && t.size[1] == 3 && t.size[2] == 4);
    CHECK(t.stride[0] == 12 && t.stride[1] == 4 && t.stride[2] == 1);
    const orchard_tensor u = orchard_tensor_transpose(t, 0, 2);
    CHECK(u.size[0] == 4 && u.size[1] == 3 && u.size[2] == 2);
    CHECK(u.stride[0] == 1 && u.stride[1] == 4 && u.stride[2] == 12);
    CHECK(memcmp(&(orchard_tensor[]){orchard_tensor_transpose(t, 0, 3)}[0], &t, sizeof t) == 0);
    CHECK(memcmp(&(orchard_tensor[]){orchard_tensor_transpose(t, -1, 0)}[0], &t, sizeof t) == 0);
    const orchard_tensor empty = ORCHARD_TENSOR(data, ORCHARD_F32, 2, 0, 4);
    CHECK(empty.size[1] == 0 && empty.stride[1] == 4 && empty.stride[0] == 4);
    const orchard_tensor scalar = orchard_tensor_dense(data, ORCHARD_F64, 0, NULL);
    CHECK(scalar.rank == 0 && scalar.data == data);
}

int main(void)
{
    every_field_is_where_it_was();
    no_field_is_forgotten();
    constants();
    names();
    tensor_helpers();
    return check_report("layout");
}
