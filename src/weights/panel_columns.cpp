#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "core/checked_math.hpp"
#include "weights/columns_by_group.hpp"
#include "weights/panel.hpp"

/// Which source column stands at each packed k of a panel: groups of scales begin on groups of the format,
/// and activation order is undone.
namespace fusedmoe {
namespace {

/// Scale blocks that span all of K (or all rows) are written with -1.
int64_t GroupColumns(const WeightFormat& format) {
  return format.block.col;
}

/// Columns of a super-block where the panel has units of scales; else 0.
int64_t SuperColumns(const WeightFormat& weight, const PanelFormat& format) {
  return format.scale == PanelScale::kI8 ? weight.super_cols : 0;
}

/// The scale column that source column c uses.
int64_t ScaleColumn(const CanonicalMatrix& matrix, int64_t col) {
  if (!matrix.group_index.empty()) {
    return matrix.group_index.view().as<int32_t>()[col];
  }
  const int64_t group = GroupColumns(matrix.format);
  return group <= 0 ? 0 : (matrix.scale_col_offset + col) / group;
}

}  // namespace

// Counted: a comparison sort was a tenth of packing INT4.
std::vector<int32_t> ColumnsByGroup(const Tensor& group_index) {
  const std::span<const int32_t> groups(group_index.view().as<int32_t>(),
                                        static_cast<size_t>(group_index.view().count()));
  const int32_t last = groups.empty() ? 0 : *std::max_element(groups.begin(), groups.end());
  std::vector<int32_t> next(static_cast<size_t>(last) + 2, 0), columns(groups.size());
  for (const int32_t group : groups) {
    ++next[static_cast<size_t>(group) + 1];
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (size_t column = 0; column < groups.size(); ++column) {
    columns[static_cast<size_t>(next[static_cast<size_t>(groups[column])]++)] = static_cast<int32_t>(column);
  }
  return columns;
}

std::vector<int32_t> PanelColumns(const CanonicalMatrix& matrix, const PanelFormat& format) {
  std::vector<int32_t> columns;
  columns.reserve(static_cast<size_t>(matrix.cols + format.block));
  const auto fill_to = [&](int64_t multiple) {
    columns.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(columns.size()), multiple)), -1);
  };
  if (matrix.group_index.empty()) {
    const int64_t group = format.group == 0 ? 0 : GroupColumns(matrix.format);
    const int64_t super = SuperColumns(matrix.format, format), unit = std::max(group, super);
    const bool aligned = group <= 0 || (group % format.group == 0 && matrix.scale_col_offset % unit == 0);
    for (int64_t col = 0; col < matrix.cols;) {
      const int64_t from = matrix.scale_col_offset + col;
      const int64_t end = aligned ? matrix.cols : std::min(matrix.cols, col + group - from % group);
      fill_to(super > 0 && from % super == 0 ? format.block : std::max<int64_t>(format.group, 1));
      const size_t begin = columns.size();
      columns.resize(begin + static_cast<size_t>(end - col));
      std::iota(columns.begin() + static_cast<std::ptrdiff_t>(begin), columns.end(),
                static_cast<int32_t>(col));
      col = end;
    }
    fill_to(format.block);
    return columns;
  }
  const std::vector<int32_t> by_group = ColumnsByGroup(matrix.group_index);
  const auto* groups = matrix.group_index.view().as<int32_t>();
  for (auto begin = by_group.begin(); begin != by_group.end();) {
    const int32_t group = groups[*begin];
    const auto end = format.group == 0
                         ? by_group.end()
                         : std::find_if(begin, by_group.end(), [&](int32_t c) { return groups[c] != group; });
    fill_to(std::max<int64_t>(format.group, 1));
    columns.insert(columns.end(), begin, end);
    begin = end;
  }
  fill_to(format.block);
  return columns;
}

bool PanelColumnsAreIdentity(std::span<const int32_t> columns) {
  size_t real = columns.size();
  while (real > 0 && columns[real - 1] < 0) {
    --real;
  }
  int32_t differences = 0;  // without a way out, so that it runs in vectors: every matrix asks
  for (size_t k = 0; k < real; ++k) {
    differences |= columns[k] ^ static_cast<int32_t>(k);
  }
  return differences == 0;
}

int64_t PanelColumnsBound(const WeightFormat& weight, const PanelFormat& format, int64_t cols,
                          bool reordered) {
  const int64_t group = weight.has_block_scale() ? weight.block.col : 0;
  const bool aligned = format.group == 0 || group <= 0 || group % format.group == 0;
  int64_t bound = cols;
  if (SuperColumns(weight, format) > 0 && reordered) {
    // The first and the last super-block may end inside a block, and a group begin before the slice.
    return (cols + 2 * (format.block - 1) + group - 1) / format.block * format.block;
  }
  if (!aligned || reordered) {
    // Every group may end inside one of ours; a slice has one more than its columns would fill.
    const int64_t groups = group <= 0 ? 1 : CeilDiv(cols, group) + 1;
    bound += groups * (std::max<int64_t>(format.group, 1) - 1);
  }
  return RoundUp(bound, format.block);
}

std::vector<int32_t> PanelScaleColumns(const CanonicalMatrix& matrix, const PanelFormat& format,
                                       std::span<const int32_t> columns) {
  std::vector<int32_t> scale_columns;
  for (size_t first = 0; format.group > 0 && first < columns.size();
       first += static_cast<size_t>(format.group)) {
    const int32_t col = columns[first];
    scale_columns.push_back(col < 0 ? -1 : static_cast<int32_t>(ScaleColumn(matrix, col)));
  }
  return scale_columns;
}

}  // namespace fusedmoe
