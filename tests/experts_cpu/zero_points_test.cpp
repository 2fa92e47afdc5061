#include <algorithm>
#include <cmath>
#include <vector>

#include "bounds.hpp"
#include "core/checked_math.hpp"
#include "experts/cpu/kernels/kernels.hpp"
#include "support/super_scales.hpp"

/// Integers in groups whose zero points are any numbers, (code - zero) * scale: the types of GGUF that have
/// minima.
namespace fusedmoe::cpu {
namespace {

/// Any codes. Scales of both signs and several sizes, zero points far outside the codes beside small scales,
/// and in each row a group of which nothing is left.
CanonicalMatrix RandomGroups(DType code, int64_t group, int64_t rows, int64_t cols, std::mt19937& random) {
  CanonicalMatrix matrix;
  matrix.format = ParseScheme(code == DType::kU4 ? "int4_w4a16:g32" : "int8_w8a16:g32")->weight;
  matrix.format.block.col = group;
  matrix.format.block_scale_dtype = matrix.format.zero_point_dtype = DType::kF32;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.codes = *Tensor::Allocate(code, Shape{rows, cols});
  for (int64_t i = 0; i < matrix.codes.view().total_bytes(); ++i) {
    matrix.codes.mutable_view().data()[i] = static_cast<std::byte>(random() & 255);
  }
  const int64_t groups = (cols + group - 1) / group;
  matrix.block_scale = *Tensor::Allocate(DType::kF32, Shape{rows, groups});
  matrix.zero_point = *Tensor::Allocate(DType::kF32, Shape{rows, groups});
  auto* scales = matrix.block_scale.mutable_view().as<float>();
  auto* zeros = matrix.zero_point.mutable_view().as<float>();
  std::uniform_real_distribution<float> size(0.2F, 1.0F), exponent(0.0F, 4.0F);
  for (int64_t i = 0; i < rows * groups; ++i) {
    const float sign = random() % 2 == 0 ? 1.0F : -1.0F, far = std::pow(10.0F, exponent(random));
    zeros[i] = sign * size(random) * far;  // up to 1e4
    scales[i] = (random() % 2 == 0 ? 1.0F : -1.0F) * size(random) / (random() % 2 == 0 ? far : 16.0F);
    scales[i] = i % groups == i / groups % groups ? 0.0F : scales[i];
  }
  return matrix;
}

/// A token that a tile holds as it is: in each 64 k codes of the tile times a power of two, the first of them
/// the largest one.
std::vector<float> ExactToken(TileKind kind, int64_t cols, int64_t padded, std::mt19937& random) {
  const int largest = kind == kTileA24 ? 127 << 14 : kind == kTileA16 ? 127 << 7 : 127;
  std::vector<float> token(static_cast<size_t>(padded), 0.0F);
  int power = 0;
  for (int64_t k = 0; k < cols; ++k) {
    power = k % 64 == 0 ? static_cast<int>(random() % 4) : power;
    const int code = k % 64 == 0
                         ? -largest
                         : static_cast<int>(random() % static_cast<uint32_t>(2 * largest + 1)) - largest;
    token[static_cast<size_t>(k)] = std::ldexp(static_cast<float>(code), -power);
  }
  return token;
}

/// A sum in fp64 (without zero points: of the middle code), and what fp32 may add to it. Of a group: the sums
/// of codes times activations and of activations are rounded when they become fp32 (three planes: twice, and
/// joined), then come the multiply-add that takes the zero point off, the scale, four additions of a unit and
/// one for each unit with the activation scale: 10 + units roundings of at most 2^-24 of |scale| (sum of
/// |code x| + |zero sum of x|) of all groups.
struct Sum {
  double value = 0, bound = 0;
};
Sum ExpectedSum(const CanonicalMatrix& matrix, int64_t row, const std::vector<float>& token) {
  const int64_t groups = matrix.block_scale.dim(1), group = matrix.format.block.col;
  const std::byte* codes = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
  Sum sum;
  for (int64_t g = 0; g < groups; ++g) {
    double of_codes = 0, magnitude = 0, of_token = 0;
    for (int64_t k = g * group; k < std::min((g + 1) * group, matrix.cols); ++k) {
      const auto x = static_cast<double>(token[static_cast<size_t>(k)]);
      const double product = static_cast<double>(LoadCode(matrix.format.element, codes, k)) * x;
      of_codes += product;
      magnitude += std::fabs(product);
      of_token += x;
    }
    const auto scale = static_cast<double>(matrix.block_scale.view().as<float>()[row * groups + g]);
    const double zero = matrix.zero_point.empty()
                            ? matrix.format.implied_zero()
                            : static_cast<double>(matrix.zero_point.view().as<float>()[row * groups + g]);
    sum.value += scale * (of_codes - zero * of_token);
    sum.bound += std::fabs(scale) * (magnitude + std::fabs(zero * of_token));
  }
  sum.bound *= 0x1p-24 * (10.0 + static_cast<double>(token.size()) / 64.0) * 1.01;
  return sum;
}

/// Tokens of a tile, one behind the other as packing leaves them; `tile` joins them.
struct Tile {
  std::vector<std::vector<float>> tokens;
  std::vector<std::vector<int32_t>> rows;
  std::vector<int32_t> memory;
  TileView view;
};
Tile MakeTile(const KernelTable& table, const PanelFormat& panel, TileKind kind, int height, int64_t cols,
              int64_t padded, std::mt19937& random) {
  const WeightKernel kernel = KernelFor(panel);
  Tile tile;
  const int64_t words = RoundUp(TileRowBytes(kernel, kind, padded) / 4, kTileWords);
  const int32_t* pointers[kMaxHeight];
  for (int t = 0; t < height; ++t) {
    tile.tokens.push_back(ExactToken(kind, cols, padded, random));
    tile.rows.emplace_back(static_cast<size_t>(words));
    PackArguments arguments{};
    arguments.tile = ViewTile(tile.rows.back().data(), kernel, kind, padded, 1);
    arguments.correction = CorrectionOf(kernel, panel.has_zero_points());
    arguments.units = padded / 64;
    arguments.values = tile.tokens.back().data();
    table.pack[kind](&arguments);
  }
  std::transform(tile.rows.begin(), tile.rows.end(), pointers,
                 [](const std::vector<int32_t>& row) { return row.data(); });
  tile.memory.resize(static_cast<size_t>(words * height));
  table.interleave(pointers, words, height, tile.memory.data());
  tile.view = ViewTile(tile.memory.data(), kernel, kind, padded, height);
  tile.view.group_scales = GroupScalesOf(panel);
  return tile;
}

void ExpectSums(const CanonicalMatrix& matrix, const std::string& isa, std::mt19937& random) {
  const KernelTable& table = *FindKernelTable(*ParseIsa(isa));
  const PanelFormat panel = *ChoosePanelFormat(matrix.format, !matrix.zero_point.empty());
  ASSERT_EQ(panel.group, matrix.format.block.col);
  const std::vector<int32_t> columns = PanelColumns(matrix, panel);
  const auto padded = static_cast<int64_t>(columns.size());
  const int64_t stripes = (matrix.rows + kPanelRows - 1) / kPanelRows;
  const int64_t stripe_bytes = padded / panel.block * panel.block_bytes();
  std::vector<std::byte> bytes(static_cast<size_t>((stripes + 8) * stripe_bytes));  // prefetches go beyond
  for (int64_t stripe = 0; stripe < stripes; ++stripe) {
    PackPanelStripe(matrix, panel, columns, stripe, bytes.data() + stripe * stripe_bytes);
  }
  const auto* first = reinterpret_cast<const uint8_t*>(bytes.data());
  for (const TileKind kind : {kTileA24, kTileA16, kTileA8}) {
    for (int index = 0; index < kNumHeights; ++index) {
      const DotKernel dot = table.dot[KernelFor(panel)][kind][index];
      const bool tall = kHeights[index] == kMaxHeight && table.batch[KernelFor(panel)][kind] != nullptr;
      if (dot == nullptr && !tall) {
        continue;
      }
      const int height = kHeights[index];
      Tile tile = MakeTile(table, panel, kind, height, matrix.cols, padded, random);
      std::vector<float> actual(static_cast<size_t>(stripes * height * kPanelRows));
      if (tall) {
        void* rows[kMaxHeight];
        std::transform(tile.rows.begin(), tile.rows.end(), rows, [](auto& row) { return row.data(); });
        tile.view.tall_tile.rows = rows;
        table.batch[KernelFor(panel)][kind](first, stripes, stripe_bytes, padded / panel.block, &tile.view, 1,
                                            actual.data());
      } else {
        dot(first, stripes, padded / panel.block, &tile.view, actual.data());
      }
      for (int64_t i = 0; i < stripes * kPanelRows * height; ++i) {
        const int64_t row = i / (height * kPanelRows) * kPanelRows + i % kPanelRows;
        const auto token = static_cast<size_t>(i / kPanelRows % height);
        const Sum expected =
            row < matrix.rows ? ExpectedSum(matrix, row, tile.tokens[token]) : Sum{};  // rows of the padding
        ASSERT_NEAR(actual[static_cast<size_t>(i)], expected.value, expected.bound)
            << isa << " " << panel.ToString() << " " << matrix.rows << " x " << matrix.cols << " kind "
            << kind << " height " << height << " row " << row << " token " << token;
      }
    }
  }
}

TEST(Kernel_FloatZeroPoints, AgreeWithFp64) {
  for (const std::string& isa : cpu_test::HostIsas()) {
    for (const DType code : {DType::kU4, DType::kU8}) {
      for (const int64_t group : {16, 32, 64, 128}) {
        std::mt19937 random(static_cast<uint32_t>(group));
        for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 128}, {48, 640}, {21, 600}}) {
          const CanonicalMatrix matrix = RandomGroups(code, group, rows, cols, random);
          ASSERT_EQ(ChoosePanelFormat(matrix.format, true)->zeros, PanelZero::kFloats);
          ExpectSums(matrix, isa, random);
        }
      }
    }
  }
}

// Scales and minima of two levels. Of a zero point stored as a number the kernel has the minimum itself: one
// rounding of the bound less, and one that the zero point had of its own (2^-24 of |zero|).
TEST(Kernel_SuperBlocks, AgreeWithFp64) {
  for (const std::string& isa : cpu_test::HostIsas()) {
    for (const DType code : {DType::kU4, DType::kU8}) {
      for (const int64_t group : {16, 32}) {
        std::mt19937 random(static_cast<uint32_t>(group));
        for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 128}, {48, 640}, {21, 600}}) {
          for (const bool minima : {group == 32, true}) {
            CanonicalMatrix matrix = RandomGroups(code, group, rows, cols, random);
            testing_support::MakeSuper(matrix, minima, random);
            ASSERT_EQ(ChoosePanelFormat(matrix.format, minima)->scale, PanelScale::kI8);
            ExpectSums(matrix, isa, random);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
