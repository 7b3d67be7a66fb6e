/* Elements of a tensor as doubles, for plain code: the reference and the audit call this for every
 * number that they read. */
#include "core/convert.h"
#include "core/tensor.h"

double orch_element_load(orchard_dtype dtype, const void *data, int64_t index)
{
    switch (dtype) {
    case ORCHARD_F64:
        return ((const double *)data)[index];
    case ORCHARD_F32:
        return ((const float *)data)[index];
    case ORCHARD_F16:
        return orch_f16_to_f32(((const uint16_t *)data)[index]);
    case ORCHARD_BF16:
        return orch_bf16_to_f32(((const uint16_t *)data)[index]);
    case ORCHARD_I64:
        return (double)((const int64_t *)data)[index];
    case ORCHARD_I32:
        return ((const int32_t *)data)[index];
    case ORCHARD_I16:
        return ((const int16_t *)data)[index];
    case ORCHARD_I8:
        return ((const int8_t *)data)[index];
    case ORCHARD_U8:
        return ((const uint8_t *)data)[index];
    case ORCHARD_BOOL:
        return ((const uint8_t *)data)[index] != 0;
    case ORCHARD_DTYPE_NONE:
        break;
    }
    return 0;
}

void orch_element_store(orchard_dtype dtype, void *data, int64_t index, double value)
{
    if (dtype == ORCHARD_F64) {
        ((double *)data)[index] = orch_canonical_f64(value);
    } else if (dtype == ORCHARD_F32) {
        ((float *)data)[index] = orch_canonical_f32((float)value);
    } else if (dtype == ORCHARD_F16) {
        ((uint16_t *)data)[index] = orch_f64_to_f16(value);
    } else if (dtype == ORCHARD_BF16) {
        ((uint16_t *)data)[index] = orch_f64_to_bf16(value);
    }
}
