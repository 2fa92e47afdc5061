#include "jobs/verify/output_distance.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "numerics/rows.hpp"

namespace fusedmoe::verify {
namespace {

constexpr int64_t kMapRows = 64, kMapCols = 96;

std::vector<float> RowOf(const Tensor& tensor, int64_t row) {
  std::vector<float> values(static_cast<size_t>(tensor.dim(1)));
  DecodeRow(tensor.dtype(), tensor.view().data() + row * tensor.view().stride_bytes(0), 0, tensor.dim(1),
            values.data());
  return values;
}

}  // namespace

void CompareRows(const Tensor& actual, const Tensor& expected, const Routed& routed, int64_t worst,
                 VerifyReport& report, RowsDistance& distance) {
  const int64_t rows = actual.dim(0), cols = actual.dim(1);
  report.rows = rows;
  report.map_rows = std::min(rows, kMapRows);
  report.map_cols = std::min(cols, kMapCols);
  std::vector<Distance> patches(static_cast<size_t>(report.map_rows * report.map_cols));
  std::vector<double> map_norm(static_cast<size_t>(report.map_rows));
  const int64_t top_k = routed.ids.dim(1);
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<float> left = RowOf(actual, row), right = RowOf(expected, row);
    Distance all;
    const int64_t map_row = row * report.map_rows / rows;
    for (int64_t col = 0; col < cols; ++col) {
      Distance one;
      one.Take(left[static_cast<size_t>(col)], right[static_cast<size_t>(col)], distance.range());
      all.Add(one);
      patches[static_cast<size_t>(map_row * report.map_cols + col * report.map_cols / cols)].Add(one);
    }
    map_norm[static_cast<size_t>(map_row)] += all.norm;
    RowError error{row, all.relative(), {}};
    const int32_t* ids = routed.ids.view().as<int32_t>() + row * top_k;
    error.experts.assign(ids, ids + top_k);
    report.worst_rows.push_back(std::move(error));
    distance.AddRow(all);
  }
  report.rel_l2 = distance.relative();
  report.max_row_error = distance.largest();
  report.not_finite = distance.not_finite();
  report.overflowed = distance.overflowed();
  for (size_t index = 0; index < patches.size(); ++index) {
    const double norm =
        map_norm[index / static_cast<size_t>(report.map_cols)] / static_cast<double>(report.map_cols);
    report.error_map.push_back(patches[index].difference == 0
                                   ? 0.0F
                                   : static_cast<float>(std::sqrt(patches[index].difference / norm)));
  }
  std::stable_sort(
      report.worst_rows.begin(), report.worst_rows.end(), [](const RowError& a, const RowError& b) {
        return std::isnan(a.rel_l2) != std::isnan(b.rel_l2) ? std::isnan(a.rel_l2) : a.rel_l2 > b.rel_l2;
      });
  report.worst_rows.resize(
      std::min(report.worst_rows.size(), static_cast<size_t>(std::max<int64_t>(worst, 0))));
}

Status CompareExperts(const Runner& judged, const Runner& reference, TensorView hidden, const Routed& routed,
                      VerifyReport& report) {
  const int64_t tokens = hidden.dim(0), top_k = routed.ids.dim(1), cols = hidden.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, routed.ids.shape()));
  auto* chosen = ids.mutable_view().as<int32_t>();
  const auto* all = routed.ids.view().as<int32_t>();
  std::map<int64_t, std::pair<int64_t, Distance>> experts;
  const bool shared = judged.layer->config().shared.intermediate > 0;
  std::array<Tensor, 2> base;
  for (int64_t slot = shared ? -1 : 0; slot < top_k; ++slot) {
    for (int64_t index = 0; index < tokens * top_k; ++index) {
      chosen[index] = index % top_k == slot ? all[index] : -1;
    }
    std::array<Tensor, 2> rows;
    for (size_t side = 0; side < 2; ++side) {
      const Runner& runner = side == 0 ? judged : reference;
      FMOE_ASSIGN_OR_RETURN(rows[side], runner.Run(hidden, ids.view(), routed.weights.view(), DType::kF32));
    }
    if (slot < 0) {
      base = rows;
      continue;
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const int32_t expert = all[token * top_k + slot];
      if (expert < 0) {
        continue;
      }
      auto& [count, distance] = experts[expert];
      ++count;
      for (int64_t col = 0; col < cols; ++col) {
        const int64_t at = token * cols + col;
        std::array<float, 2> value{};
        for (size_t side = 0; side < 2; ++side) {
          value[side] =
              rows[side].view().as<float>()[at] - (shared ? base[side].view().as<float>()[at] : 0.0F);
        }
        distance.Take(value[0], value[1]);
      }
    }
  }
  for (const auto& [expert, sum] : experts) {
    report.experts.push_back({expert, sum.first, sum.second.relative()});
  }
  return Status::Ok();
}

}  // namespace fusedmoe::verify
