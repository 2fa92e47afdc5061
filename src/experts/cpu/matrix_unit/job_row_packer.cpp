#include "experts/cpu/matrix_unit/job_row_packer.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {

void JobRowPacker::Pack(const InputTransform& transform, const JobRow& row, float* buffer) const {
  const MatrixUnitPlan& plan = layer_.plan.matrix_unit;
  const int64_t width = shape_.padded_cols;
  ScaleColumns(transform, shape_.cols, buffer);  // never with codes: ExpertsTraits::takes_codes
  float* values = buffer;
  if (plan.codes) {
    if (row.codes == nullptr && transform.columns == nullptr && PackRounded(transform, row, buffer)) {
      return;
    }
    values = buffer + width;
    QuantizeToValues(row, reader_.TensorScale(transform), buffer, values);
  }
  values = InPackedOrder(shape_, transform, values);
  if (plan.int8) {
    auto* codes = reinterpret_cast<int8_t*>(buffer);  // whose values are not needed any more
    for (int64_t k = 0; k < width; ++k) {
      codes[k] = static_cast<int8_t>(values[k]);
    }
    PackCodes(row, codes);
    return;
  }
  TilePack pack = PackOf(row, values);
  if (format_.sum_group > 0) {
    pack.sum = row.sums;
    pack.sum_group = format_.sum_group;
    pack.sum_stride = row.stride;
  }
  unit_.kernels->pack(&pack);
}

/// Rounds a row on its way into the tiles, where the kernels can; else false.
bool JobRowPacker::PackRounded(const InputTransform& transform, const JobRow& row, float* buffer) const {
  const MatrixUnitPlan& plan = layer_.plan.matrix_unit;
  const int64_t width = shape_.padded_cols;
  if (plan.int8) {
    if (plan.scale_group > 0 || !CanRoundRows(layer_.activation)) {
      return false;
    }
    auto* codes = reinterpret_cast<int8_t*>(buffer + 2 * width);
    QuantizeRowToCodes(*layer_.kernels, layer_.activation, reader_.TensorScale(transform), buffer,
                       shape_.cols, codes, row.scales);
    std::fill(codes + shape_.cols, codes + width, int8_t{0});
    PackCodes(row, codes);
    return true;
  }
  return shape_.cols == width && format_.sum_group == 0 &&
         PackRoundedRow(*layer_.kernels, *unit_.kernels, layer_.activation, PackOf(row, buffer), row.scales,
                        row.stride);
}

/// The row as the values of its codes, apart from their scales. `values` has room for two rows, of which the
/// second holds codes on the way.
void JobRowPacker::QuantizeToValues(const JobRow& row, float tensor_scale, const float* from,
                                    float* values) const {
  const ActivationFormat& format = layer_.activation;
  const int64_t width = shape_.padded_cols;
  if (row.codes != nullptr) {
    DecodeRowToBlocks(format, tensor_scale, row.codes, row.code_scales, shape_.cols, values, row.scales,
                      row.stride);
  } else if (CanRoundRows(format)) {
    QuantizeRowToBlocks(*layer_.kernels, format, tensor_scale, from, shape_.cols, values, row.scales,
                        row.stride);
  } else {
    auto* codes = reinterpret_cast<std::byte*>(values + width);
    QuantizeRow(format, tensor_scale, from, shape_.cols, codes, codes + width);
    DecodeRowToBlocks(format, tensor_scale, codes, codes + width, shape_.cols, values, row.scales,
                      row.stride);
  }
  const int64_t groups = layer_.plan.matrix_unit.gemms[shape_.gemm].scales;
  for (int64_t g = std::max<int64_t>(ScalesPerRow(format, shape_.cols), 1); g < groups; ++g) {
    row.scales[g * row.stride] = 1.0F;  // of padding
  }
}

void JobRowPacker::PackCodes(const JobRow& row, const int8_t* codes) const {
  unit_.kernels->pack_codes(codes, shape_.padded_cols / kPanelUnit, row.token, row.step_bytes,
                            reinterpret_cast<int32_t*>(row.sums));
}

TilePack JobRowPacker::PackOf(const JobRow& row, const float* values) const {
  TilePack pack{};
  pack.values = values;
  pack.count = shape_.padded_cols;
  pack.token = row.token;
  pack.step_bytes = row.step_bytes;
  pack.shift = format_.shift;
  pack.permuted = format_.permuted;
  return pack;
}

}  // namespace fusedmoe::cpu
