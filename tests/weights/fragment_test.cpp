#include "weights/fragment.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "canonical.hpp"
#include "weights/dequantize.hpp"
#include "weights/fragment_pack.hpp"
#include "weights/fragment_stager.hpp"

namespace fusedmoe {
namespace {

struct Case {
  std::string scheme;
  FragmentFormat format;
  bool zero_points = false;
  DType scale = DType::kBF16;  ///< of integer groups
};

std::vector<Case> Cases() {
  return {{"unquantized", FragmentFormat::kBf16},
          {"fp8_w8a8:channel", FragmentFormat::kFp8},
          {"fp8_w8a8:tensor", FragmentFormat::kFp8},
          {"fp8_w8a8:block128", FragmentFormat::kFp8Block},
          {"int8_w8a8:channel", FragmentFormat::kInt8},
          {"int8_w8a8:block128", FragmentFormat::kInt8Zero128},
          {"int8_w8a16:g32", FragmentFormat::kInt8Zero32},
          {"int8_w8a16:g128", FragmentFormat::kInt8Zero128, true},
          {"int4_w4a16:g128", FragmentFormat::kInt4Half128},
          {"int4_w4a16:g128", FragmentFormat::kInt4Half128, false, DType::kF16},
          {"int4_w4a16:g128", FragmentFormat::kInt4Zero128, false, DType::kF32},
          {"int4_w4a16:g128", FragmentFormat::kInt4Zero128, true},
          {"int4_w4a16:g64", FragmentFormat::kInt4Zero64, true},
          {"int4_w4a16:g32", FragmentFormat::kInt4Zero32},
          {"int4_w4a16:channel", FragmentFormat::kInt4},
          {"int4_w4afp8:g128", FragmentFormat::kInt4Half128, false, DType::kF8E4M3},
          {"nvfp4_w4a16", FragmentFormat::kNvfp4},
          {"nvfp4_w4a8:g32", FragmentFormat::kNvfp4},
          {"mxfp8_w8a8", FragmentFormat::kMxfp8},
          {"mxfp4_w4a16", FragmentFormat::kMxfp4},
          {"w_mxfp6_e3m2", FragmentFormat::kMxfp8},
          {"w_mxfp6_e2m3", FragmentFormat::kMxfp8}};
}

WeightFormat FormatOf(const Case& c) {
  WeightFormat format = ParseScheme(c.scheme)->weight;
  if (c.scheme.starts_with("int4") && format.has_block_scale()) {
    format.block_scale_dtype = c.scale;
  }
  return format;
}

struct Packed {
  std::vector<uint8_t> gate_up, down;
  std::vector<float> gate_up_tensor, down_tensor, gate_up_row, down_row, gate_up_bias, down_bias;
  FragmentSizes sizes;
  FragmentOutput view() {
    return {gate_up.data(),     down.data(),     gate_up_tensor.data(), down_tensor.data(),
            gate_up_row.data(), down_row.data(), gate_up_bias.data(),   down_bias.data()};
  }
};

Packed Allocate(const FragmentSpec& spec, int64_t hidden, int64_t intermediate, bool gated) {
  Packed packed;
  packed.sizes = FragmentSizesOf(spec, hidden, intermediate, gated);
  const auto rows = static_cast<size_t>(packed.sizes.gate_up_rows * packed.sizes.parts);
  packed.gate_up.assign(static_cast<size_t>(packed.sizes.gate_up_bytes), 0xa5);
  packed.down.assign(static_cast<size_t>(packed.sizes.down_bytes), 0xa5);
  packed.gate_up_tensor.resize(2);
  packed.down_tensor.resize(1);
  packed.gate_up_row.assign(rows, NAN);
  packed.gate_up_bias.assign(rows, NAN);
  packed.down_row.assign(static_cast<size_t>(packed.sizes.down_rows), NAN);
  packed.down_bias.assign(static_cast<size_t>(packed.sizes.down_rows), NAN);
  return packed;
}

CanonicalExpert RandomExpert(const Case& c, int64_t hidden, int64_t intermediate, bool gated,
                             std::mt19937& generator) {
  MatrixOptions options;
  options.zero_points = c.zero_points;
  CanonicalExpert expert;
  const WeightFormat format = FormatOf(c);
  if (gated) {
    expert.gate = RandomMatrix(intermediate, hidden, format, generator, options);
    expert.gate.bias = RandomFloats(DType::kF32, Shape{intermediate}, generator, -1, 1);
  }
  expert.up = RandomMatrix(intermediate, hidden, format, generator, options);
  expert.up.bias = RandomFloats(DType::kF32, Shape{intermediate}, generator, -1, 1);
  expert.down = RandomMatrix(hidden, intermediate, format, generator, options);
  return expert;
}

/// The codes and scales of a row block.
struct BlockView {
  const uint8_t* codes;
  const uint8_t* scales;
};

BlockView BlockOf(const std::vector<uint8_t>& matrix, const FragmentPlaces& places, int64_t b) {
  EXPECT_EQ(matrix.size(), static_cast<size_t>(places.bytes));
  return {matrix.data() + places.Codes(b), matrix.data() + places.Scales(b)};
}

/// One weight of the packed form with all its scales; 0 and true for padding that decodes to zero.
void ExpectRow(const CanonicalMatrix& matrix, const FragmentSpec& spec, const BlockView& block, int row,
               int64_t matrix_row, float tensor, float row_scale, float bias, const std::string& what) {
  const int64_t padded = FragmentCols(spec.format, matrix.cols);
  std::vector<float> expected(static_cast<size_t>(padded), 0.0F);
  if (matrix_row < matrix.rows) {
    DequantizeRow(matrix, matrix_row, expected.data());
    const bool has_bias = !matrix.bias.empty();
    ASSERT_EQ(bias, has_bias ? matrix.bias.view().as<float>()[matrix_row] : 0.0F) << what;
  } else {
    ASSERT_EQ(bias, 0.0F) << what;
    row_scale = 1.0F;
  }
  // Scales beside zero points keep 15 mantissa bits; otherwise only the order of two products differs.
  const float bound = FragmentTraitsOf(spec.format).scale == FragmentScale::kF32Zero ? 1.6e-5F : 2.4e-7F;
  for (int64_t k = 0; k < padded; ++k) {
    const float want = expected[static_cast<size_t>(k)];
    const float value = FragmentValue(spec, block.codes, block.scales, row, k) * row_scale * tensor;
    ASSERT_LE(std::fabs(value - want), bound * std::fabs(want))
        << what << " row " << matrix_row << " column " << k << ": " << value << " for " << want;
  }
}

void CheckCase(const Case& c, int64_t hidden, int64_t intermediate, bool gated) {
  const std::string what = c.scheme + (c.zero_points ? " with zero points" : "") + (gated ? "" : " ungated") +
                           " " + std::to_string(hidden) + "x" + std::to_string(intermediate);
  std::mt19937 generator(17);
  const CanonicalExpert expert = RandomExpert(c, hidden, intermediate, gated, generator);
  const Result<FragmentSpec> spec = ChooseFragmentSpec(expert.up.format, c.zero_points);
  ASSERT_TRUE(spec.ok()) << what << ": " << spec.status().ToString();
  ASSERT_EQ(spec->format, c.format) << what << ": " << spec->ToString();
  Packed packed = Allocate(*spec, hidden, intermediate, gated);
  const Status status = PackFragmentExpert(expert, *spec, packed.view());
  ASSERT_TRUE(status.ok()) << what << ": " << status.ToString();

  const FragmentPlaces gate_up = FragmentPlacesOf(spec->format, GateUpBlocks(intermediate, gated), hidden);
  std::vector<int> seen(static_cast<size_t>(intermediate), 0);
  for (int64_t b = 0; b < GateUpBlocks(intermediate, gated); ++b) {
    for (int row = 0; row < 16; ++row) {
      const FragmentSource source = GateUpSource(b, row, gated);
      const size_t part = gated && source.up ? 1 : 0;
      const auto at =
          part * static_cast<size_t>(packed.sizes.gate_up_rows) + static_cast<size_t>(source.column);
      if (source.column < intermediate) {
        seen[static_cast<size_t>(source.column)] += source.up ? 1 : 16;
      }
      ExpectRow(source.up ? expert.up : expert.gate, *spec, BlockOf(packed.gate_up, gate_up, b), row,
                source.column, packed.gate_up_tensor[part], packed.gate_up_row[at], packed.gate_up_bias[at],
                what + (source.up ? " up" : " gate"));
    }
  }
  for (const int count : seen) {
    ASSERT_EQ(count, gated ? 17 : 1) << what << ": every row once";
  }
  const FragmentPlaces down = FragmentPlacesOf(spec->format, DownBlocks(hidden), intermediate);
  for (int64_t row = 0; row < DownBlocks(hidden) * 16; ++row) {
    ExpectRow(expert.down, *spec, BlockOf(packed.down, down, row / 16), static_cast<int>(row % 16), row,
              packed.down_tensor[0], packed.down_row[static_cast<size_t>(row)],
              packed.down_bias[static_cast<size_t>(row)], what + " down");
  }

  // And back: other numbers in every tensor first.
  std::mt19937 other(99);
  CanonicalExpert back = RandomExpert(c, hidden, intermediate, gated, other);
  const auto copy_scalars = [](const CanonicalMatrix& from, CanonicalMatrix& to) {
    to.tensor_scale = from.tensor_scale;
  };
  copy_scalars(expert.gate, back.gate);
  copy_scalars(expert.up, back.up);
  copy_scalars(expert.down, back.down);
  ASSERT_TRUE(UnpackFragmentExpert(*spec, packed.view(), back).ok());
  const auto expect_same = [&](const CanonicalMatrix& a, const CanonicalMatrix& b, const char* name) {
    if (a.empty()) {
      return;
    }
    ASSERT_EQ(std::memcmp(a.codes.view().data(), b.codes.view().data(),
                          static_cast<size_t>(a.codes.view().total_bytes())),
              0)
        << what << " codes of " << name;
    const bool rounded =
        c.scale == DType::kF32 || FormatOf(c).block_scale_dtype == DType::kF32;  // F32 scales keep 15 bits
    const bool held = FragmentTraitsOf(spec->format).group > 0;
    if (held && !rounded) {
      ASSERT_EQ(std::memcmp(a.block_scale.view().data(), b.block_scale.view().data(),
                            static_cast<size_t>(a.block_scale.view().total_bytes())),
                0)
          << what << " scales of " << name;
    }
    if (!a.zero_point.empty()) {
      ASSERT_EQ(std::memcmp(a.zero_point.view().data(), b.zero_point.view().data(),
                            static_cast<size_t>(a.zero_point.view().total_bytes())),
                0)
          << what << " zero points of " << name;
    }
  };
  expect_same(expert.gate, back.gate, "gate");
  expect_same(expert.up, back.up, "up");
  expect_same(expert.down, back.down, "down");
}

TEST(Fragment, EveryFormat_PackedValueIsTheDefinitionAndUnpackGivesItBack) {
  for (const Case& c : Cases()) {
    CheckCase(c, 256, 128, true);
  }
}

TEST(Fragment, SizesWithTails_PaddingIsZero) {
  for (const Case& c : Cases()) {
    // K tails: hidden cuts a slab, intermediate a slab and its group; rows that are no multiple of 16.
    const bool grouped =
        FormatOf(c).has_block_scale() && FormatOf(c).block.row == 1 && FormatOf(c).block.col > 0;
    const int64_t group = grouped ? FormatOf(c).block.col : 2;
    CheckCase(c, 5 * group + (group < 64 ? 64 : 0), 3 * group, true);
    CheckCase(c, 3 * group, group, false);
  }
}

TEST(Fragment, ZeroNvfp4Scale_ClearsItsBlock) {
  const Case c{"nvfp4_w4a16", FragmentFormat::kNvfp4};
  std::mt19937 generator(3);
  CanonicalExpert expert = RandomExpert(c, 64, 64, true, generator);
  expert.down.block_scale.mutable_view().data()[5] = std::byte{0};
  expert.down.block_scale.mutable_view().data()[6] = std::byte{1};  // the smallest subnormal
  const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, false);
  Packed packed = Allocate(spec, 64, 64, true);
  ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok());
  std::vector<float> row(64);
  DequantizeRow(expert.down, 1, row.data());
  const BlockView block = BlockOf(packed.down, FragmentPlacesOf(spec.format, DownBlocks(64), 64), 0);
  for (int64_t k = 0; k < 64; ++k) {
    const float value = FragmentValue(spec, block.codes, block.scales, 1, k) * packed.down_tensor[0];
    EXPECT_FLOAT_EQ(value, row[static_cast<size_t>(k)]) << "column " << k;
    if (k >= 16 && k < 32) {
      EXPECT_EQ(value, 0.0F) << "column " << k;
    }
  }
}

TEST(Fragment, ScaleOfNaN_MakesItsGroupNaNAndNoOther) {
  for (const Case& c : Cases()) {
    std::mt19937 generator(5);
    CanonicalExpert expert = RandomExpert(c, 256, 256, true, generator);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
    if (FragmentTraitsOf(spec.format).group == 0) {
      continue;
    }
    const DType dtype = expert.down.block_scale.dtype();
    const int64_t bytes = DTypeBits(dtype) / 8, columns = expert.down.block_scale.dim(1);
    ASSERT_GE(columns, 2) << c.scheme;
    const uint32_t nan = dtype == DType::kF8E8M0 ? 0xffU : 0x7fffffffU;  // all of the mantissa
    std::byte* const last = expert.down.block_scale.mutable_view().data() + (columns - 1) * bytes;
    std::memcpy(last, &nan, static_cast<size_t>(bytes));
    if (dtype == DType::kF8E4M3 || bytes == 2) {
      last[bytes - 1] = std::byte{0x7f};
    } else if (bytes == 4) {
      last[3] = std::byte{0x7f};
    }
    Packed packed = Allocate(spec, 256, 256, true);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok()) << c.scheme;
    std::vector<float> row(256);
    DequantizeRow(expert.down, 0, row.data());
    int64_t nans = 0;
    const BlockView block = BlockOf(packed.down, FragmentPlacesOf(spec.format, DownBlocks(256), 256), 0);
    for (int64_t k = 0; k < 256; ++k) {
      const float value = FragmentValue(spec, block.codes, block.scales, 0, k) * packed.down_tensor[0];
      nans += std::isnan(row[static_cast<size_t>(k)]) ? 1 : 0;
      EXPECT_EQ(std::isnan(value), std::isnan(row[static_cast<size_t>(k)])) << c.scheme << " column " << k;
    }
    EXPECT_EQ(nans, 256 / columns) << c.scheme;
    CanonicalExpert back = RandomExpert(c, 256, 256, true, generator);
    ASSERT_TRUE(UnpackFragmentExpert(spec, packed.view(), back).ok());
    std::vector<float> again(256);
    back.down.tensor_scale = expert.down.tensor_scale;
    DequantizeRow(back.down, 0, again.data());
    EXPECT_TRUE(std::isnan(again.back())) << c.scheme;
  }
}

void SetOrder(CanonicalMatrix& matrix, std::mt19937& generator) {
  auto index = *Tensor::Allocate(DType::kI32, Shape{matrix.cols});
  auto* values = index.mutable_view().as<int32_t>();
  for (int64_t col = 0; col < matrix.cols; ++col) {
    values[col] = static_cast<int32_t>(col / matrix.format.block.col);
  }
  std::shuffle(values, values + matrix.cols, generator);
  matrix.group_index = std::move(index);
}

/// Weights in activation order are sorted by groups: the input is told, the intermediate comes out sorted.
TEST(Fragment, ActivationOrder_ColumnsByGroup_IntermediateInTheOrderOfDown) {
  for (const Case& c : {Case{"int4_w4a16:g128", FragmentFormat::kInt4Half128},
                        Case{"int4_w4a16:g32", FragmentFormat::kInt4Zero32, true},
                        Case{"int8_w8a16:g128", FragmentFormat::kInt8Zero128, true}}) {
    std::mt19937 generator(29);
    constexpr int64_t kHidden = 256, kIntermediate = 384;
    CanonicalExpert expert = RandomExpert(c, kHidden, kIntermediate, true, generator);
    SetOrder(expert.up, generator);
    expert.gate.group_index = expert.up.group_index;
    SetOrder(expert.down, generator);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
    Packed packed = Allocate(spec, kHidden, kIntermediate, true);
    std::vector<int32_t> input(kHidden, -1);
    FragmentOutput out = packed.view();
    EXPECT_EQ(PackFragmentExpert(expert, spec, out).code(), StatusCode::kUnsupported) << "nowhere to tell it";
    out.input_order = input.data();
    ASSERT_TRUE(PackFragmentExpert(expert, spec, out).ok()) << c.scheme;
    std::vector<float> row(kHidden), down_row(kIntermediate);
    std::vector<int> seen(kHidden, 0);
    DequantizeRow(expert.down, 3, down_row.data());
    const FragmentPlaces places = FragmentPlacesOf(spec.format, GateUpBlocks(kIntermediate, true), kHidden);
    const FragmentPlaces down_places = FragmentPlacesOf(spec.format, DownBlocks(kHidden), kIntermediate);
    const auto near = [](float value, float want) {
      return std::fabs(value - want) <= 1.6e-5F * std::fabs(want);
    };
    for (int64_t k = 0; k < kHidden; ++k) {
      ++seen[static_cast<size_t>(input[static_cast<size_t>(k)])];
    }
    EXPECT_EQ(seen, std::vector<int>(kHidden, 1)) << "every column once";
    // Each intermediate column of the layout is one of the matrix: its row of up and its column of down.
    std::vector<int> columns(kIntermediate, 0);
    for (int64_t i = 0; i < kIntermediate; ++i) {
      const int64_t b = (i / 64) * 8 + (i % 16 / 4) * 2 + (i % 4) / 2;
      const int r = static_cast<int>(i % 64 / 16 * 2 + i % 2);
      ASSERT_EQ(IntermediateColumn(b, r), i);
      const auto find = [&](int64_t source) {  // is it this row of up?
        DequantizeRow(expert.up, source, row.data());
        for (int64_t k = 0; k < kHidden; ++k) {
          const BlockView block = BlockOf(packed.gate_up, places, b);
          const float value =
              FragmentValue(spec, block.codes, block.scales, r + 8, k) * packed.gate_up_tensor[1];
          if (!near(value, row[static_cast<size_t>(input[static_cast<size_t>(k)])])) {
            return false;
          }
        }
        return true;
      };
      int64_t source = 0;
      while (source < kIntermediate && !find(source)) {
        ++source;
      }
      ASSERT_LT(source, kIntermediate) << c.scheme << " column " << i;
      ++columns[static_cast<size_t>(source)];
      EXPECT_EQ(packed.gate_up_bias[static_cast<size_t>(packed.sizes.gate_up_rows + i)],
                expert.up.bias.view().as<float>()[source]);
      const BlockView block = BlockOf(packed.down, down_places, 0);
      const float value = FragmentValue(spec, block.codes, block.scales, 3, i) * packed.down_tensor[0];
      EXPECT_PRED2(near, value, down_row[static_cast<size_t>(source)]) << c.scheme << " column " << i;
    }
    EXPECT_EQ(columns, std::vector<int>(kIntermediate, 1)) << c.scheme;
    SetOrder(expert.gate, generator);
    const Status apart = PackFragmentExpert(expert, spec, out);
    EXPECT_NE(apart.message().find("one input"), std::string::npos) << apart.message();
    auto uneven = *Tensor::Allocate(DType::kI32, Shape{kHidden});
    std::fill_n(uneven.mutable_view().as<int32_t>(), kHidden, 0);
    expert.gate.group_index = expert.up.group_index = uneven;
    const Status full = PackFragmentExpert(expert, spec, out);
    EXPECT_NE(full.message().find("group 0"), std::string::npos) << full.message();
  }
}

/// A product with NaN is NaN whatever the token: the row's scale says it, since the kernels' expansion does
/// not.
TEST(Fragment, CodesOfNaN_MakeTheScaleOfTheirRowNaN) {
  for (const char* scheme : {"fp8_w8a8:channel", "fp8_w8a8:tensor", "fp8_w8a8:block128", "mxfp8_w8a8"}) {
    std::mt19937 generator(31);
    const Case c{scheme, FragmentFormat::kFp8};
    CanonicalExpert expert = RandomExpert(c, 128, 192, true, generator);
    const auto spoil = [](CanonicalMatrix& matrix, int64_t row, int64_t col, int code) {
      matrix.codes.mutable_view().data()[row * matrix.codes.view().stride_bytes(0) + col] =
          static_cast<std::byte>(code);
    };
    spoil(expert.gate, 3, 127, 0x7f);
    spoil(expert.up, 191, 0, 0xff);
    spoil(expert.down, 70, 64, 0x7f);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, false);
    Packed packed = Allocate(spec, 128, 192, true);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok()) << scheme;
    const auto nans = [](const std::vector<float>& values) {
      std::vector<size_t> at;
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) {
          at.push_back(i);
        }
      }
      return at;
    };
    EXPECT_EQ(nans(packed.gate_up_row), (std::vector<size_t>{3, 192 + 191})) << scheme;
    EXPECT_EQ(nans(packed.down_row), std::vector<size_t>{70}) << scheme;
    FragmentOutput out = packed.view();
    out.gate_up_row_scale = out.down_row_scale = nullptr;
    EXPECT_EQ(PackFragmentExpert(expert, spec, out).code(), StatusCode::kUnsupported) << scheme;
  }
}

template <FragmentFormat kFormat>
void ArrangeAs(const StagedRows& staged, const FragmentPiece& piece, const FragmentPlaces& places,
               uint8_t* matrix) {
  const int64_t slabs = int64_t{staged.code_bytes} * 8 / FragmentTraitsOf(kFormat).code_bits / kFragmentSlab;
  for (int64_t b = 0; b < piece.blocks; ++b) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      for (int lane = 0; lane < 32; ++lane) {
        ArrangeSlab<kFormat>(staged, b, slab, lane, places, piece.first_block + b, matrix);
      }
    }
  }
}

void Arrange(FragmentFormat format, const StagedRows& staged, const FragmentPiece& piece,
             const FragmentPlaces& places, uint8_t* matrix) {
  switch (format) {
#define FMOE_ARRANGE_CASE(id, name, code, bits, scale, group) \
  case FragmentFormat::id:                                    \
    return ArrangeAs<FragmentFormat::id>(staged, piece, places, matrix);
    FMOE_FRAGMENT_FORMATS(FMOE_ARRANGE_CASE)
#undef FMOE_ARRANGE_CASE
  }
}

/// Whatever K is: copies that begin inside a line of memory are slower.
TEST(Fragment, ScalesApart_UnitsAndMatricesBeginOnLines) {
  for (const auto& [blocks, cols] : {std::pair{3, 128}, {360, 2880}, {446, 256}}) {
    const FragmentPlaces places = FragmentPlacesOf(FragmentFormat::kFp8Block, blocks, cols);
    const int64_t units = (cols + 127) / 128;
    const int64_t codes = blocks * units * 2048;
    EXPECT_EQ(places.Codes(1), units * 2048);
    EXPECT_EQ(places.Scales(3), codes) << "four row blocks have the same";
    EXPECT_EQ(places.Scales(4), codes + units * 16);
    EXPECT_EQ(places.bytes, (codes + (blocks + 3) / 4 * units * 16 + 127) / 128 * 128);
  }
  const FragmentPlaces together = FragmentPlacesOf(FragmentFormat::kNvfp4, 3, 128);
  EXPECT_EQ(together.Codes(2), 2 * 2 * 576);
  EXPECT_EQ(together.Scales(2), 2 * 2 * 576 + 512);
  EXPECT_EQ(together.bytes, 3 * 2 * 576);
}

/// As an upload does it: buffers of several pieces, arranged one piece after the other.
TEST(Fragment, PiecesTogether_ArrangeToTheBlocksOfTheExpert) {
  for (const Case& c : Cases()) {
    std::mt19937 generator(41);
    const CanonicalExpert expert = RandomExpert(c, 384, 320, true, generator);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
    Packed packed = Allocate(spec, 384, 320, true);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok()) << c.scheme;
    const auto stager = FragmentStager::Create(expert, spec);
    ASSERT_TRUE(stager.ok());
    const int64_t fewest = FragmentStager::FewestBytes(spec, 384, 320, true);
    constexpr int64_t kAll = int64_t{1} << 30;
    for (const auto& [bytes, first_bytes] : {std::pair{fewest, fewest},
                                             {5 * fewest / 2, 5 * fewest / 2},
                                             {kAll, kAll},
                                             {kAll, 2 * fewest},
                                             {kAll, int64_t{0}}}) {
      std::vector<uint8_t> gate_up(packed.gate_up.size(), 0xee), down(packed.down.size(), 0xee);
      std::vector<int64_t> nan_rows;
      const std::vector<FragmentPieces> copies = stager->CutTogether(bytes, first_bytes);
      if (first_bytes < bytes) {
        EXPECT_EQ(copies.size(), 2U) << c.scheme << ": a first piece, and the rest";
        EXPECT_LE(stager->StagedBytes(copies[0].front()), std::max(first_bytes, fewest)) << c.scheme;
      }
      for (const FragmentPieces& together : copies) {
        std::vector<uint32_t> buffer(static_cast<size_t>(bytes == kAll ? 8 * fewest : bytes) / 4);
        auto* staged = reinterpret_cast<uint8_t*>(buffer.data());
        for (const FragmentPiece& piece : together) {
          ASSERT_LE(staged + stager->StagedBytes(piece),
                    reinterpret_cast<uint8_t*>(buffer.data() + buffer.size()))
              << c.scheme << ": more than a buffer holds";
          stager->Stage(piece, staged, nan_rows);
          const bool is_down = piece.part == FragmentPart::kDown;
          Arrange(spec.format, stager->View(piece, staged), piece, stager->PlacesOf(piece),
                  (is_down ? down : gate_up).data());
          staged += stager->StagedBytes(piece);
        }
      }
      EXPECT_EQ(gate_up, packed.gate_up) << c.scheme << " " << bytes;
      EXPECT_EQ(down, packed.down) << c.scheme << " " << bytes;
    }
    EXPECT_EQ(stager->CutTogether(kAll).size(), 1U) << c.scheme << ": a buffer holds all";
  }
}

/// Pieces of any size arrange to the same blocks.
TEST(Fragment, Pieces_CoverEveryBlockOnce) {
  for (const Case& c : Cases()) {
    for (const bool gated : {true, false}) {
      std::mt19937 generator(37);
      const CanonicalExpert expert = RandomExpert(c, 384, 256, gated, generator);
      const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
      const auto stager = FragmentStager::Create(expert, spec);
      ASSERT_TRUE(stager.ok());
      const FragmentSizes sizes = FragmentSizesOf(spec, 384, 256, gated);
      for (const int64_t bytes : {int64_t{0}, int64_t{40} << 10, int64_t{1} << 30}) {
        int64_t at[2] = {0, 0};
        for (const FragmentPiece& piece : stager->Cut(bytes)) {
          const bool down = piece.part == FragmentPart::kDown;
          EXPECT_EQ(piece.first_block, at[down ? 1 : 0]) << c.scheme;
          at[down ? 1 : 0] += piece.blocks;
          EXPECT_EQ(stager->PlacesOf(piece).bytes, down ? sizes.down_bytes : sizes.gate_up_bytes) << c.scheme;
          EXPECT_LE(stager->StagedBytes(piece),
                    std::max(bytes, FragmentStager::FewestBytes(spec, 384, 256, gated)))
              << c.scheme;
        }
        EXPECT_EQ(at[0], GateUpBlocks(256, gated)) << c.scheme << " " << bytes;
        EXPECT_EQ(at[1], DownBlocks(384)) << c.scheme << " " << bytes;
      }
    }
  }
}

TEST(Fragment, WhatItCannotHold_IsRefusedWithReason) {
  const WeightFormat int4 = ParseScheme("int4_w4a16:g128")->weight;
  std::mt19937 generator(5);
  MatrixOptions options;
  const FragmentSpec spec = *ChooseFragmentSpec(int4, false);
  options.col_offset = 64;
  const Status cut = CheckFragmentMatrix(RandomMatrix(16, 128, int4, generator, options), spec);
  EXPECT_NE(cut.message().find("column 64"), std::string::npos) << cut.message();
  EXPECT_FALSE(ChooseFragmentSpec({.element = DType::kF32}, false).ok());
  EXPECT_FALSE(ChooseFragmentSpec({.element = DType::kF8E5M2}, false).ok());
}

TEST(Fragment, TokenPosition_IsAPermutationThatMatchesTheFragments) {
  std::vector<int> seen(64, 0);
  for (int k = 0; k < 64; ++k) {
    ++seen[static_cast<size_t>(TokenPosition(k))];
    // k-step j holds positions 16 j .. 16 j + 15; lane q's pairs stand at 2 q and 8 + 2 q.
    const int j = k % 16 / 4, q = k / 16;
    EXPECT_EQ(TokenPosition(k), 16 * j + (k % 4 < 2 ? 2 * q + k % 2 : 8 + 2 * q + k % 2)) << k;
  }
  for (const int count : seen) {
    EXPECT_EQ(count, 1);
  }
}

// Where the code of row `row`, column k of a row block of two slabs stands among its bytes, from what the
// 8-bit matrix instructions take, when rows of tokens stand in memory by TokenByte. Integers are A fragments
// of 16 rows x 32 k: byte i of register a0 + h of lane 4 r + q is row r + 8 (h % 2), column 4 q + i + 16 (h /
// 2). e4m3 are shared memory operands of 8 rows x 64 bytes, where the 64-byte swizzle puts chunk c of row r
// at c ^ (r / 2).
int64_t OperandByte(FragmentCode code, int row, int k) {
  const int at = TokenByte(code, k), r = row & 7;
  if (code == FragmentCode::kInt8) {
    const int column = at % 32;
    return at / 32 * 512 + (4 * r + column % 16 / 4) * 16 + ((row >> 3) + 2 * (column / 16)) * 4 + column % 4;
  }
  return at / 64 * 1024 + (row >> 3) * 512 + r * 64 + (at % 64 / 16 ^ r / 2) * 16 + at % 16;
}

TEST(Fragment, EightBitPieces_AreOperandsAsTheyStand) {
  for (const char* scheme : {"fp8_w8a8:channel", "int8_w8a8:channel"}) {
    const WeightFormat format = ParseScheme(scheme)->weight;
    const FragmentSpec spec = *ChooseFragmentSpec(format, false);
    const FragmentCode code = FragmentTraitsOf(spec.format).code;
    std::vector<int> seen(kFragmentByteSlab, 0);
    for (int k = 0; k < kFragmentByteSlab; ++k) {
      ++seen[static_cast<size_t>(TokenByte(code, k))];
    }
    EXPECT_EQ(seen, std::vector<int>(kFragmentByteSlab, 1)) << scheme;
    std::mt19937 generator(23);
    CanonicalExpert expert;
    expert.up = RandomMatrix(256, 64, format, generator);
    expert.down = RandomMatrix(64, 256, format, generator);
    Packed packed = Allocate(spec, 64, 256, false);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok());
    const std::byte* const codes = expert.down.codes.view().data();
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 256; ++k) {
        const int64_t offset = k / kFragmentByteSlab * 2048 + OperandByte(code, row, k % kFragmentByteSlab);
        EXPECT_EQ(static_cast<int>(packed.down[static_cast<size_t>(offset)]),
                  static_cast<int>(codes[row * expert.down.codes.view().stride_bytes(0) + k]))
            << scheme << " " << row << " " << k;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe
