#include "experts/cpu/vectors/row_packer.hpp"

#include <algorithm>
#include <cstring>

#include "experts/cpu/cpu_choice.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Codes of a row in the order of packed columns: `columns`[k] of the row, 0 where it is negative; null: as
/// they are, and zeros behind them. `out` may be `codes` then.
void PlaceCodes(const int8_t* codes, const int32_t* columns, const GemmShape& shape, int8_t* out) {
  if (columns == nullptr) {
    if (out != codes) {
      std::memcpy(out, codes, static_cast<size_t>(shape.cols));
    }
    std::fill(out + shape.cols, out + shape.padded_cols, int8_t{0});
    return;
  }
  for (int64_t k = 0; k < shape.padded_cols; ++k) {
    out[k] = columns[k] < 0 ? int8_t{0} : codes[columns[k]];
  }
}

}  // namespace

float* RowPacker::RowInPlace(const InputTransform& transform, int64_t slot) const {
  const bool as_it_is = shape_.gemm == kDown && layer_.plan.rows == RowRule::kAsTheyAre &&
                        transform.pre_quant_scale == nullptr && transform.columns == nullptr &&
                        shape_.cols == shape_.padded_cols;
  return as_it_is ? reader_.Mid(slot) : nullptr;
}

void RowPacker::Pack(const InputTransform& transform, int64_t slot, float* buffer, std::byte* tile) const {
  const TileView view = ViewTile(tile, shape_.kernel, shape_.tile, shape_.padded_cols, 1);
  if (const float* row = RowInPlace(transform, slot)) {
    PackValues(row, view);
    return;
  }
  const bool codes = layer_.plan.rows == RowRule::kCodes;
  if (!(codes && reader_.coded())) {
    reader_.Load(transform, slot, buffer);
  }
  ScaleColumns(transform, shape_.cols, buffer);
  const Row row{transform, slot, buffer};
  if (codes) {
    IsPairTile(shape_.tile) ? PackBlocks(row, view) : PackCodes(row, view);
    return;
  }
  if (layer_.plan.rows == RowRule::kFakeQuantized && !reader_.coded()) {
    RoundRowInPlace(*layer_.kernels, layer_.activation, reader_.TensorScale(transform), buffer, shape_.cols);
  }
  PackValues(InPackedOrder(shape_, transform, buffer), view);
}

/// `padded_cols` values in packed order, which the tile quantizes for itself or not at all.
void RowPacker::PackValues(const float* values, const TileView& tile) const {
  PackArguments arguments{.tile = tile, .correction = correction()};
  arguments.units = shape_.padded_cols / kPanelUnit;
  arguments.values = values;
  layer_.kernels->pack[shape_.tile](&arguments);
}

/// A row as codes of the scheme. Behind its values, 4 * `padded_cols` bytes: codes in packed order, codes as
/// the scheme has them, scales of the tile; its last quarter holds those of the scheme.
void RowPacker::PackCodes(const Row& row, const TileView& tile) const {
  const int64_t width = shape_.padded_cols, group = ActivationGroup(shape_.kernel, shape_.tile);
  auto* buffer = reinterpret_cast<std::byte*>(row.values + width);
  auto* codes = reinterpret_cast<int8_t*>(buffer);
  auto* scales = reinterpret_cast<float*>(buffer + 2 * width);
  const ActivationFormat& format = layer_.activation;
  const float tensor_scale = reader_.TensorScale(row.transform);
  if (!reader_.coded() && CanRoundRows(format)) {
    const int32_t* columns = row.transform.columns;
    int8_t* rounded = columns == nullptr ? codes : reinterpret_cast<int8_t*>(buffer + width);
    QuantizeRowToCodes(*layer_.kernels, format, tensor_scale, row.values, shape_.cols, rounded, scales);
    PlaceCodes(rounded, columns, shape_, codes);
    // From the back: none is read after it changed. Where groups are the same, padding takes the last scale.
    const int64_t own =
        format.group.col == group ? std::max<int64_t>(ScalesPerRow(format, shape_.cols), 1) : 0;
    for (int64_t g = width / group; g-- > own;) {
      scales[g] = scales[ScaleIndex(g)];
    }
  } else if (reader_.coded()) {
    PlaceStoredCodes(row, reader_.Codes(row.slot), codes);
    DecodeScales(tensor_scale, reader_.CodeScales(row.slot), scales);
  } else {
    std::byte* stored_scales = buffer + 3 * width;
    QuantizeRow(format, tensor_scale, row.values, shape_.cols, buffer + width, stored_scales);
    PlaceStoredCodes(row, buffer + width, codes);
    DecodeScales(tensor_scale, stored_scales, scales);
  }
  PackCodesArguments arguments{.tile = tile, .correction = correction()};
  arguments.units = width / kPanelUnit;
  arguments.scales_per_unit = static_cast<int>(kPanelUnit / group);
  arguments.codes = codes;
  arguments.scales = scales;
  layer_.kernels->pack_codes(&arguments);
}

/// Codes as QuantizeRow stores them to such of tiles.
void RowPacker::PlaceStoredCodes(const Row& row, const std::byte* stored, int8_t* codes) const {
  if (shape_.tile != kTileA4) {
    PlaceCodes(reinterpret_cast<const int8_t*>(stored), row.transform.columns, shape_, codes);
    return;
  }
  static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const auto* bytes = reinterpret_cast<const uint8_t*>(stored);
  for (int64_t k = 0; k < shape_.cols; ++k) {
    codes[k] = kDoubled[k % 2 == 0 ? bytes[k / 2] & 15 : bytes[k / 2] >> 4];
  }
  std::fill(codes + shape_.cols, codes + shape_.padded_cols, int8_t{0});  // such weights are never reordered
}

/// Which of the scheme's scales of a row counts for a group of the tile.
int64_t RowPacker::ScaleIndex(int64_t group) const {
  const ActivationFormat& format = layer_.activation;
  const int64_t last = std::max<int64_t>(ScalesPerRow(format, shape_.cols), 1) - 1;
  const int64_t k = group * ActivationGroup(shape_.kernel, shape_.tile);
  return format.group.col > 0 ? std::min(last, k / format.group.col) : 0;
}

/// One scale for each group of the tile, from what a scheme stores.
void RowPacker::DecodeScales(float tensor_scale, const std::byte* stored, float* scales) const {
  const ActivationFormat& format = layer_.activation;
  const float halved = shape_.tile == kTileA4 ? 0.5F : 1.0F;
  const int64_t groups = shape_.padded_cols / ActivationGroup(shape_.kernel, shape_.tile);
  for (int64_t g = 0; g < groups; ++g) {
    float scale = tensor_scale;
    if (!IsPerTensor(format)) {
      const int64_t index = ScaleIndex(g);
      if (format.scale_dtype == DType::kF32) {
        std::memcpy(&scale, stored + index * 4, 4);
      } else {
        scale = DecodeCode(format.scale_dtype, LoadCode(format.scale_dtype, stored, index)) *
                (IsTwoLevel(format) ? tensor_scale : 1.0F);
      }
    }
    scales[g] = scale * halved;
  }
}

/// A row as codes that a 16-bit tile holds exactly, with the scales beside them.
void RowPacker::PackBlocks(const Row& row, const TileView& tile) const {
  const ActivationFormat& format = layer_.activation;
  const float tensor_scale = reader_.TensorScale(row.transform);
  if (reader_.coded()) {
    DecodeRowToBlocks(format, tensor_scale, reader_.Codes(row.slot), reader_.CodeScales(row.slot),
                      shape_.cols, row.values, tile.scale, 1);
  } else {
    QuantizeRowToBlocks(*layer_.kernels, format, tensor_scale, row.values, shape_.cols, row.values,
                        tile.scale, 1);
  }
  PackArguments arguments{.tile = tile,
                          .units = shape_.padded_cols / kPanelUnit,
                          .nibbles = !IsFloatKernel(shape_.kernel),
                          .scales = tile.scale};
  // From scales of the scheme's groups to one a unit, from the back: none is read after it changed.
  const bool grouped = format.scale_dtype == DType::kF32 && format.group.col > 0;
  const int64_t last = grouped ? ScalesPerRow(format, shape_.cols) - 1 : 0;
  for (int64_t unit = arguments.units; unit-- > 0;) {
    tile.scale[unit] = tile.scale[grouped ? std::min(last, unit * kPanelUnit / format.group.col) : 0];
  }
  arguments.values = InPackedOrder(shape_, row.transform, row.values);
  layer_.kernels->pack[shape_.tile](&arguments);
}

}  // namespace fusedmoe::cpu
