#include <algorithm>
#include <cstring>

#include "experts/cpu/cpu_choice.hpp"
#include "experts/cpu/cpu_experts.hpp"
#include "experts/cpu/cpu_run.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

/// From rows of activations to tiles: quantized as the scheme says, packed as the micro-kernels read them.
namespace fusedmoe::cpu {
namespace {

/// Codes of a row in the order of packed columns: `columns`[k] of the row, 0 where it is negative; null: as
/// they are, and zeros behind them. `out` may be `codes` then.
void PlaceCodes(const int8_t* codes, const int32_t* columns, int64_t count, int64_t width, int8_t* out) {
  if (columns == nullptr) {
    if (out != codes) {
      std::memcpy(out, codes, static_cast<size_t>(count));
    }
    std::fill(out + count, out + width, int8_t{0});
    return;
  }
  for (int64_t k = 0; k < width; ++k) {
    out[k] = columns[k] < 0 ? int8_t{0} : codes[columns[k]];
  }
}

/// Work below this many values is not worth waking threads for: 4 K values take some 2 us, and what one
/// thread packs of rows that others computed waits for their caches.
constexpr int64_t kSerialValues = 4 << 10;

}  // namespace

void CpuExperts::PackTiles(Run& run, const GemmShape& shape, int part) const {
  if (NeedsDynamicTensorScale(activation_) && run.num_slots > 0 && part != 1) {  // up has the scale of gate
    const float* given = part != 2 && run.coded ? run.input->rows.tensor_scale : nullptr;
    run.batch_scale = given != nullptr ? *given : BatchScale(run, shape);
  }
  if (run.num_tiles == 0) {
    return;
  }
  const bool shared = part != 2 && !run.batched && shared_inputs_[part];
  if (shared) {
    PackTokens(run, shape, part);
  }
  int64_t rows = run.num_slots;
  if (shared) {  // what is left is to put tokens side by side
    rows = 0;
    for (const Tile* tile = run.tiles; tile != run.tiles + run.num_tiles; ++tile) {
      rows += ReadsTokensApart(plan_, *tile) ? 0 : tile->count;
    }
  }
  const int64_t tasks = std::min(kPackTasks, run.num_tiles);
  const Executor serial;
  const bool small = rows * shape.padded_cols <= kSerialValues;
  ParallelFor(small ? serial : *run.executor, tasks, [&](int64_t task) {
    for (int64_t tile = run.num_tiles * task / tasks; tile < run.num_tiles * (task + 1) / tasks; ++tile) {
      PackTile(run, shape, part, shared, run.tiles[tile], task);
    }
  });
}

/// Notes the tokens of some slots, for NumberTokens; token_places are -1 before the first.
void CpuExperts::NoteTokens(Run& run, int64_t first_slot, int64_t count) {
  for (int64_t slot = first_slot; slot < first_slot + count; ++slot) {
    run.token_places[run.slot_rows[slot] - run.first_token] = static_cast<int32_t>(slot);
  }
}

/// Numbers those that were noted, in ascending order: token_places, and place_slots the other way. How many.
int64_t CpuExperts::NumberTokens(Run& run) {
  int32_t places = 0;
  for (int64_t token = 0; token < run.num_tokens; ++token) {
    int32_t& place = run.token_places[token];
    if (place >= 0) {
      run.place_slots[places] = place;
      place = places++;
    }
  }
  return places;
}

/// Every token that visits an expert of a tile, once: tiles of one token.
void CpuExperts::PackTokens(Run& run, const GemmShape& shape, int part) const {
  std::fill_n(run.token_places, run.num_tokens, -1);
  for (const Tile* tile = run.tiles; tile != run.tiles + run.num_tiles; ++tile) {
    NoteTokens(run, tile->first_slot, tile->count);
  }
  const int64_t places = NumberTokens(run);
  std::byte* tiles = run.TokenTiles(plan_, part);
  const int64_t tasks = std::min<int64_t>(kPackTasks, places);
  const int64_t widest = std::max(plan_.gate_up.padded_cols, plan_.down.padded_cols);
  const Executor serial;
  const bool small = places * shape.padded_cols <= kSerialValues;
  ParallelFor(small ? serial : *run.executor, tasks, [&](int64_t task) {
    for (int64_t place = places * task / tasks; place < places * (task + 1) / tasks; ++place) {
      PackRow(run, shape, experts_[0].input[part], run.place_slots[place],
              run.row_buffers + task * 2 * widest, tiles + place * shape.tile_row_bytes);
    }
  });
}

/// The scale that the finite values of all rows ask for: of every token once, or of every slot.
float CpuExperts::BatchScale(Run& run, const GemmShape& shape) const {
  const bool tokens = &shape == &plan_.gate_up && !run.batched;
  int64_t count = run.num_slots;
  if (tokens) {
    std::fill_n(run.token_places, run.num_tokens, -1);
    NoteTokens(run, 0, run.num_slots);
    count = NumberTokens(run);
  }
  const int64_t tasks = std::min({kPackTasks, plan_.max_tiles, count});
  const int64_t widest = std::max(plan_.gate_up.padded_cols, plan_.down.padded_cols);
  float largest[kPackTasks] = {};
  ParallelFor(*run.executor, tasks, [&](int64_t task) {
    float* row = run.row_buffers + task * 2 * widest;
    float own = 0;  // neighbours write to the same line
    for (int64_t i = count * task / tasks; i < count * (task + 1) / tasks; ++i) {
      LoadRow(run, shape, experts_[0].input[0], tokens ? run.place_slots[i] : i, row);
      own = std::max(own, FiniteAmaxOfRow(*table_, row, shape.cols));
    }
    largest[task] = own;
  });
  return DynamicTensorScale(activation_, *std::max_element(largest, largest + kPackTasks));
}

/// The scale of a whole tensor: stored with the weights, or that of the rows of this forward.
float CpuExperts::TensorScale(const Run& run, const InputTransform& transform) const {
  return activation_.static_tensor_scale ? transform.tensor_scale : run.batch_scale;
}

/// The input of a slot as fp32: a hidden state, or what the activation left.
void CpuExperts::LoadRow(const Run& run, const GemmShape& shape, const InputTransform& transform,
                         int64_t slot, float* row) const {
  if (&shape == &plan_.gate_up && run.coded) {
    const int64_t source = run.slot_rows[slot];
    DequantizeRow(activation_, TensorScale(run, transform), run.rows + source * run.row_bytes,
                  run.row_scales == nullptr ? nullptr : run.row_scales + source * run.row_scale_bytes,
                  shape.cols, row);
  } else if (&shape == &plan_.gate_up) {
    table_->to_float[run.row_type](run.rows + run.slot_rows[slot] * run.row_bytes, shape.cols, row);
  } else {
    std::memcpy(row, run.mid + slot * plan_.gate_up.row_stride(),
                static_cast<size_t>(shape.cols) * sizeof(float));
  }
}

/// Which of the scheme's scales of a row counts for group g of a tile's.
int64_t CpuExperts::ScaleIndex(const GemmShape& shape, int64_t g) const {
  const int64_t last = std::max<int64_t>(ScalesPerRow(activation_, shape.cols), 1) - 1;
  const int64_t group = ActivationGroup(shape.kernel, shape.tile);
  return activation_.group.col > 0 ? std::min(last, g * group / activation_.group.col) : 0;
}

/// One scale for each group of the tile, from what a scheme stores.
void CpuExperts::DecodeScales(const GemmShape& shape, float tensor_scale, const std::byte* stored,
                              float* scales) const {
  const float halved = shape.tile == kTileA4 ? 0.5F : 1.0F;
  const int64_t groups = shape.padded_cols / ActivationGroup(shape.kernel, shape.tile);
  for (int64_t g = 0; g < groups; ++g) {
    float scale = tensor_scale;
    if (!IsPerTensor(activation_)) {
      const int64_t index = ScaleIndex(shape, g);
      if (activation_.scale_dtype == DType::kF32) {
        std::memcpy(&scale, stored + index * 4, 4);
      } else {
        scale = DecodeCode(activation_.scale_dtype, LoadCode(activation_.scale_dtype, stored, index)) *
                (IsTwoLevel(activation_) ? tensor_scale : 1.0F);
      }
    }
    scales[g] = scale * halved;
  }
}

/// Fills the code, scale and unit fields of `arguments` from a row. `buffer` holds 4 * `width` bytes.
void CpuExperts::QuantizeToCodes(const Run& run, const GemmShape& shape, const InputTransform& transform,
                                 int64_t slot, float* row, std::byte* buffer,
                                 PackCodesArguments& arguments) const {
  const int64_t width = shape.padded_cols;
  const bool coded = run.coded && &shape == &plan_.gate_up;
  auto* codes = reinterpret_cast<int8_t*>(buffer);
  auto* scales = reinterpret_cast<float*>(buffer + 2 * width);
  const int64_t group = ActivationGroup(shape.kernel, shape.tile);
  const float tensor_scale = TensorScale(run, transform);
  arguments.units = width / kPanelUnit;
  arguments.scales_per_unit = static_cast<int>(kPanelUnit / group);
  arguments.codes = codes;
  arguments.scales = scales;
  if (!coded && CanRoundRows(activation_)) {
    int8_t* rounded = transform.columns == nullptr ? codes : reinterpret_cast<int8_t*>(buffer + width);
    QuantizeRowToCodes(*table_, activation_, tensor_scale, row, shape.cols, rounded, scales);
    PlaceCodes(rounded, transform.columns, shape.cols, width, codes);
    // From the back: none is read after it changed. Where groups are the same, padding takes the last scale.
    const int64_t own =
        activation_.group.col == group ? std::max<int64_t>(ScalesPerRow(activation_, shape.cols), 1) : 0;
    for (int64_t g = width / group; g-- > own;) {
      scales[g] = scales[ScaleIndex(shape, g)];
    }
    return;
  }
  const std::byte* stored = buffer + width;
  const std::byte* stored_scales = buffer + 3 * width;
  if (coded) {
    stored = run.rows + run.slot_rows[slot] * run.row_bytes;
    stored_scales = run.row_scales + run.slot_rows[slot] * run.row_scale_bytes;
  } else {
    QuantizeRow(activation_, tensor_scale, row, shape.cols, buffer + width, buffer + 3 * width);
  }
  if (shape.tile == kTileA4) {
    static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const auto* bytes = reinterpret_cast<const uint8_t*>(stored);
    for (int64_t k = 0; k < shape.cols; ++k) {
      codes[k] = kDoubled[k % 2 == 0 ? bytes[k / 2] & 15 : bytes[k / 2] >> 4];
    }
    std::fill(codes + shape.cols, codes + width, int8_t{0});  // such weights are never reordered
  } else {
    PlaceCodes(reinterpret_cast<const int8_t*>(stored), transform.columns, shape.cols, width, codes);
  }
  DecodeScales(shape, tensor_scale, stored_scales, scales);
}

/// A row as codes that a 16-bit tile holds exactly, with the scales beside them.
void CpuExperts::PackBlocks(const Run& run, const GemmShape& shape, const InputTransform& transform,
                            int64_t slot, float* row, const TileView& view) const {
  PackArguments values{.tile = view,
                       .units = shape.padded_cols / kPanelUnit,
                       .nibbles = !IsFloatKernel(shape.kernel),
                       .scales = view.scale};
  const float tensor_scale = TensorScale(run, transform);
  if (run.coded && &shape == &plan_.gate_up) {
    const int64_t source = run.slot_rows[slot];
    DecodeRowToBlocks(activation_, tensor_scale, run.rows + source * run.row_bytes,
                      run.row_scales + source * run.row_scale_bytes, shape.cols, row, view.scale, 1);
  } else {
    QuantizeRowToBlocks(*table_, activation_, tensor_scale, row, shape.cols, row, view.scale, 1);
  }
  // From scales of the scheme's groups to one a unit, from the back: none is read after it changed.
  const bool grouped = activation_.scale_dtype == DType::kF32 && activation_.group.col > 0;
  const int64_t last = grouped ? ScalesPerRow(activation_, shape.cols) - 1 : 0;
  for (int64_t unit = values.units; unit-- > 0;) {
    view.scale[unit] = view.scale[grouped ? std::min(last, unit * kPanelUnit / activation_.group.col) : 0];
  }
  values.values = PackedOrder(shape, transform, row);
  table_->pack[shape.tile](&values);
}

/// The row in packed order, `padded_cols` floats, in one of the two halves of its buffer.
const float* CpuExperts::PackedOrder(const GemmShape& shape, const InputTransform& transform,
                                     float* row) const {
  if (transform.columns == nullptr) {
    std::fill(row + shape.cols, row + shape.padded_cols, 0.0F);
    return row;
  }
  float* packed = row + shape.padded_cols;
  for (int64_t k = 0; k < shape.padded_cols; ++k) {
    packed[k] = transform.columns[k] < 0 ? 0.0F : row[transform.columns[k]];
  }
  return packed;
}

/// The row as the tile takes it: PackedOrder.
const float* CpuExperts::FinishRow(const Run& run, const GemmShape& shape, const InputTransform& transform,
                                   float* row) const {
  if (plan_.rows == RowRule::kFakeQuantized && !(run.coded && &shape == &plan_.gate_up)) {
    const float tensor_scale = TensorScale(run, transform);
    RoundRowInPlace(*table_, activation_, tensor_scale, row, shape.cols);
  }
  return PackedOrder(shape, transform, row);
}

/// The intermediate row of a slot where nothing needs to be done to it before it is packed, else null.
const float* CpuExperts::RowInPlace(const Run& run, const GemmShape& shape, const InputTransform& transform,
                                    int64_t slot) const {
  const bool as_it_is = &shape == &plan_.down && plan_.rows == RowRule::kAsTheyAre &&
                        transform.pre_quant_scale == nullptr && transform.columns == nullptr &&
                        shape.cols == shape.padded_cols;
  return as_it_is ? run.mid + slot * plan_.gate_up.row_stride() : nullptr;
}

/// A row as a tile of one token.
void CpuExperts::PackRow(const Run& run, const GemmShape& shape, const InputTransform& transform,
                         int64_t slot, float* row_buffer, std::byte* out) const {
  const TileView view = ViewTile(out, shape.kernel, shape.tile, shape.padded_cols, 1);
  const Correction correction = CorrectionOf(shape.kernel, shape.panel.has_zero_points());
  if (const float* row = RowInPlace(run, shape, transform, slot)) {
    PackArguments values{.tile = view, .correction = correction};
    values.units = shape.padded_cols / kPanelUnit;
    values.values = row;
    table_->pack[shape.tile](&values);
    return;
  }
  // Whether `slot` is of gate and up or of down is for LoadRow to know; only the former may come as codes.
  if (!(run.coded && &shape == &plan_.gate_up && plan_.rows == RowRule::kCodes)) {
    LoadRow(run, shape, transform, slot, row_buffer);
  }
  if (transform.pre_quant_scale != nullptr) {
    for (int64_t k = 0; k < shape.cols; ++k) {
      row_buffer[k] *= transform.pre_quant_scale[k];
    }
  }
  if (plan_.rows == RowRule::kCodes && IsPairTile(shape.tile)) {
    PackBlocks(run, shape, transform, slot, row_buffer, view);
  } else if (plan_.rows == RowRule::kCodes) {
    PackCodesArguments codes{.tile = view, .correction = correction};
    QuantizeToCodes(run, shape, transform, slot, row_buffer,
                    reinterpret_cast<std::byte*>(row_buffer + shape.padded_cols), codes);
    table_->pack_codes(&codes);
  } else {
    PackArguments values{.tile = view, .correction = correction};
    values.units = shape.padded_cols / kPanelUnit;
    values.values = FinishRow(run, shape, transform, row_buffer);
    table_->pack[shape.tile](&values);
  }
}

/// The tokens of a tile side by side; tokens that do not exist multiply zeros. `shared`: PackTokens has been
/// there.
void CpuExperts::PackTile(Run& run, const GemmShape& shape, int part, bool shared, const Tile& tile,
                          int64_t task) const {
  const int64_t widest = std::max(plan_.gate_up.padded_cols, plan_.down.padded_cols);
  const int64_t row_bytes = shape.tile_row_bytes;
  const int64_t most_bytes = std::max(plan_.gate_up.tile_row_bytes, plan_.down.tile_row_bytes);
  std::byte* rows = run.tile_rows + task * kHeights[plan_.max_height_index] * most_bytes;
  const int height = kHeights[tile.height_index];
  const ExpertPanels& expert = experts_[static_cast<size_t>(tile.expert)];
  // Tokens that the kernels read apart stay where they are, or stand in the tile one after the other.
  const bool apart = ReadsTokensApart(plan_, tile);
  std::byte* place = run.Tiles(plan_, part) + tile.first_row * row_bytes;
  void** slot_tiles = run.SlotTiles(plan_, part) + tile.first_slot;
  const int32_t* tokens[kMaxHeight];
  for (int token = 0; token < tile.count; ++token) {
    const int64_t slot = tile.first_slot + token;
    std::byte* row = (apart ? place : rows) + token * row_bytes;
    if (shared) {
      row = run.TokenTiles(plan_, part) + run.token_places[run.slot_rows[slot] - run.first_token] * row_bytes;
    } else {
      const InputTransform& transform = part == 2 ? expert.mid : expert.input[part];
      if (shape.tile == kTileF32 && RowInPlace(run, shape, transform, slot) != nullptr) {
        row = reinterpret_cast<std::byte*>(run.mid + slot * plan_.gate_up.row_stride());  // the row itself
      } else {
        PackRow(run, shape, transform, slot, run.row_buffers + task * 2 * widest, row);
      }
    }
    slot_tiles[token] = row;
    tokens[token] = reinterpret_cast<const int32_t*>(row);
  }
  if (apart) {
    return;
  }
  if (tile.count < height) {
    std::byte* none = rows + tile.count * row_bytes;
    std::memset(none, 0, static_cast<size_t>(row_bytes));
    std::fill(tokens + tile.count, tokens + height, reinterpret_cast<const int32_t*>(none));
  }
  table_->interleave(tokens, row_bytes / 4, height, reinterpret_cast<int32_t*>(place));
}

}  // namespace fusedmoe::cpu
