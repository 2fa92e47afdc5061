#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "weights/dequantize.hpp"
#include "weights/panel.hpp"
#include "weights/quantize.hpp"

/// Matrices as panels, and what the tests of panels expect of them.
namespace fusedmoe::testing_support {

inline Tensor Normal(int64_t rows, int64_t cols, uint32_t seed) {
  Tensor tensor = *Tensor::Allocate(DType::kF32, Shape{rows, cols});
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 0.1F);
  std::generate_n(tensor.mutable_view().as<float>(), rows * cols, [&] { return normal(random); });
  return tensor;
}

inline CanonicalMatrix Quantized(const std::string& scheme, int64_t rows, int64_t cols,
                                 bool symmetric = true) {
  WeightQuantizerOptions options;
  options.symmetric = symmetric;
  Result<CanonicalMatrix> matrix =
      QuantizeMatrix(Normal(rows, cols, 7).view(), ParseScheme(scheme)->weight, options);
  EXPECT_TRUE(matrix.ok()) << matrix.status().ToString();
  return *std::move(matrix);
}

struct Panels {
  PanelFormat format;
  std::vector<int32_t> columns;
  std::vector<std::byte> bytes;
  int64_t stripe_bytes = 0;
};

inline Panels Pack(const CanonicalMatrix& matrix) {
  Panels panels;
  panels.format = *ChoosePanelFormat(matrix);
  panels.columns = PanelColumns(matrix, panels.format);
  panels.stripe_bytes =
      panels.format.stripe_bytes(static_cast<int64_t>(panels.columns.size()) / panels.format.block);
  const int64_t stripes = (matrix.rows + kPanelRows - 1) / kPanelRows;
  panels.bytes.resize(static_cast<size_t>(stripes * panels.stripe_bytes), std::byte{0xa5});
  for (int64_t stripe = 0; stripe < stripes; ++stripe) {
    PackPanelStripe(matrix, panels.format, panels.columns, stripe,
                    panels.bytes.data() + stripe * panels.stripe_bytes);
  }
  return panels;
}

/// Every element of the panels, times its row scale, is the element of the matrix that the columns name.
inline void ExpectSameValues(const CanonicalMatrix& matrix, const Panels& panels, const std::string& what) {
  std::vector<float> row(static_cast<size_t>(matrix.cols));
  std::vector<int> seen(static_cast<size_t>(matrix.cols), 0);
  const RowDecoder decoder(matrix);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    decoder.Decode(r, 0, matrix.cols, row.data());
    float row_scale[kPanelRows];
    PanelRowScales(matrix, r / kPanelRows, row_scale);
    for (size_t k = 0; k < panels.columns.size(); ++k) {
      if (panels.columns[k] < 0) {
        continue;
      }
      const float value =
          PanelValue(panels.format, panels.bytes.data() + r / kPanelRows * panels.stripe_bytes,
                     static_cast<int64_t>(panels.columns.size()) / panels.format.block, r % kPanelRows,
                     static_cast<int64_t>(k)) *
          row_scale[r % kPanelRows];
      const float expected = row[static_cast<size_t>(panels.columns[k])];
      ASSERT_LE(std::fabs(value - expected), 1.2e-7F * std::fabs(expected))  // the order of two products
          << what << " row " << r << " k " << k;
      seen[static_cast<size_t>(panels.columns[k])] += r == 0 ? 1 : 0;
    }
  }
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }))
      << what << ": a column is missing";
}

/// The same where zero points are numbers, and panels have minima in their place: `code - zero`, its product
/// with the scale and the zero point are rounded, and in the panel the product and the difference; five steps
/// of 2^-24 of |code * scale| + |minimum|.
inline void ExpectSameSums(const CanonicalMatrix& matrix, const Panels& panels, const std::string& what) {
  std::vector<double> row(static_cast<size_t>(matrix.cols));
  const RowDecoder decoder(matrix);
  const int64_t group = matrix.format.block.col;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    decoder.Decode(r, 0, matrix.cols, row.data());
    for (size_t k = 0; k < panels.columns.size(); ++k) {
      if (panels.columns[k] < 0) {
        continue;
      }
      const auto col = static_cast<size_t>(panels.columns[k]);
      const float value =
          PanelValue(panels.format, panels.bytes.data() + r / kPanelRows * panels.stripe_bytes,
                     static_cast<int64_t>(panels.columns.size()) / panels.format.block, r % kPanelRows,
                     static_cast<int64_t>(k));
      const int64_t at = (matrix.scale_row_offset + r) * matrix.block_scale.dim(1) +
                         (matrix.scale_col_offset + static_cast<int64_t>(col)) / group;
      const double scale = std::fabs(matrix.block_scale.view().as<float>()[at]);
      const double zero = std::fabs(matrix.zero_point.view().as<float>()[at]);
      ASSERT_LE(std::fabs(value - row[col]), 5 * 0x1p-24 * scale * (255.0 + zero))
          << what << " row " << r << " k " << k;
    }
  }
}

inline void ExpectSameCodes(const CanonicalMatrix& matrix, const Panels& panels, const std::string& what) {
  const auto bytes = static_cast<size_t>(matrix.codes.view().total_bytes());
  std::vector<std::byte> codes(bytes, std::byte{0});
  UnpackPanelCodes(matrix.format, panels.format, panels.columns, panels.bytes.data(), matrix.rows,
                   codes.data(), matrix.codes.view().row_bytes());
  EXPECT_EQ(0, std::memcmp(codes.data(), matrix.codes.view().data(), bytes)) << what;
}

}  // namespace fusedmoe::testing_support
