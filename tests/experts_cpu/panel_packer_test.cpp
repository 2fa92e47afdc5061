#include "experts/cpu/panel_packer.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu_layer.hpp"
#include "guarded.hpp"
#include "support/random_layer.hpp"
#include "support/super_scales.hpp"
#include "weights/block_products.hpp"
#include "weights/slice.hpp"

namespace fusedmoe::cpu {
namespace {

/// Rows of a stripe with a code of e4m3 that is NaN, bit r for row r; products are NaN themselves.
uint32_t RowsWithNan(const CanonicalMatrix& matrix, int64_t stripe) {
  uint32_t rows = 0;
  const bool fp8 = matrix.format.element == DType::kF8E4M3 && !BecomesProducts(matrix.format);
  for (int64_t row = stripe * kPanelRows; fp8 && row < std::min(matrix.rows, (stripe + 1) * kPanelRows);
       ++row) {
    const std::byte* codes = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
    const bool found = std::any_of(codes, codes + matrix.cols, [](std::byte code) {
      return (code & std::byte{0x7f}) == std::byte{0x7f};
    });
    rows |= found ? 1U << row % kPanelRows : 0U;
  }
  return rows;
}

/// Every stripe of a matrix by every instruction set of this machine.
void ExpectBytesOfTheDefinition(const CanonicalMatrix& matrix, const PanelFormat& format,
                                const std::string& what) {
  const std::vector<int32_t> columns = PanelColumns(matrix, format);
  const auto bytes =
      static_cast<size_t>(format.stripe_bytes(static_cast<int64_t>(columns.size()) / format.block));
  for (const std::string& isa : cpu_test::HostIsas()) {
    PanelPacker packer(matrix, format, columns, *FindKernelTable(*ParseIsa(isa)));
    std::vector<std::byte> expected(bytes, std::byte{0xa5});
    const Workspace memory = *Workspace::Allocate(static_cast<int64_t>(bytes));
    auto* actual = memory.Get<std::byte>(WorkspaceSlot{0, static_cast<int64_t>(bytes)});
    for (int64_t stripe = 0; stripe * kPanelRows < matrix.rows; ++stripe) {
      PackPanelStripe(matrix, format, columns, stripe, expected.data());
      std::memset(actual, 0x5a, bytes);
      const uint32_t nan_rows = packer.Pack(stripe, actual, stripe % 2 == 0 ? &packer : nullptr, stripe + 1);
      EXPECT_EQ(nan_rows, RowsWithNan(matrix, stripe)) << what << " stripe " << stripe << " with " << isa;
      ASSERT_EQ(0, std::memcmp(expected.data(), actual, bytes))
          << what << " " << matrix.rows << " x " << matrix.cols << " stripe " << stripe << " with " << isa;
    }
  }
}

TEST(PanelPacker_SuperBlocks, WritesTheBytesOfTheDefinition) {
  std::mt19937 random(4);
  for (const char* name : {"int4_w4a16:g16", "int4_w4a16:g32", "int8_w8a16:g16", "int8_w8a16:g32"}) {
    for (const bool minima : {false, true}) {
      cpu_test::Layer layer;
      layer.spec.scheme = name;
      layer.scheme = *ParseScheme(name);
      CanonicalMatrix matrix = cpu_test::RandomMatrix(layer, 37, 1280, random);
      testing_support::MakeSuper(matrix, minima, random);
      for (const auto& [col, cols] : {std::pair<int64_t, int64_t>{0, 1280}, {128, 1024}, {224, 96}}) {
        const CanonicalMatrix slice = *SliceMatrix(matrix, 0, 37, col, cols);
        const PanelFormat format = *ChoosePanelFormat(slice.format, minima);
        ASSERT_EQ(format.scale, PanelScale::kI8);
        ExpectBytesOfTheDefinition(slice, format, name);
      }
    }
  }
}

/// Bytes whose codes have fewer bits, with scales of one level and of two.
TEST(PanelPacker_CodesOfFewBits, WritesTheBytesOfTheDefinition) {
  std::mt19937 random(8);
  for (const int bits : {2, 3, 5, 6}) {
    const char* name = bits == 5 ? "int8_w8a16:g32" : "int8_w8a16:g16";
    for (const bool super : {false, true}) {
      cpu_test::Layer layer;
      layer.spec.scheme = name;
      layer.scheme = *ParseScheme(name);
      CanonicalMatrix matrix = cpu_test::RandomMatrix(layer, 37, 1280, random);
      if (super) {
        testing_support::MakeSuper(matrix, /*minima=*/true, random);
      }
      matrix.format.code_bits = bits;
      auto* codes = matrix.codes.mutable_view().as<uint8_t>();
      for (int64_t i = 0; i < matrix.rows * matrix.cols; ++i) {
        codes[i] = static_cast<uint8_t>(codes[i] & ((1 << bits) - 1));
      }
      for (const auto& [col, cols] : {std::pair<int64_t, int64_t>{0, 1280}, {128, 1024}, {224, 96}}) {
        const CanonicalMatrix slice = *SliceMatrix(matrix, 0, 37, col, cols);
        const PanelFormat format = *ChoosePanelFormat(slice.format, super);
        ASSERT_EQ(format.bits(), bits);
        ExpectBytesOfTheDefinition(slice, format, name);
      }
    }
  }
}

/// Every scheme and awkward sizes.
TEST(PanelPacker_EveryFormat, WritesTheBytesOfTheDefinition) {
  const char* const schemes[] = {
      "nvfp4_w4a16",       "nvfp4_w4a8:g32",     "mxfp4_w4a16",       "mxfp8_w8a16",        "w_mxfp6_e3m2",
      "w_mxfp6_e2m3",      "int4_w4a16:g16",     "int8_w8a16:g16",    "int4_w4a16:g32",     "int4_w4a16:g64",
      "int4_w4a16:g128",   "int4_w4a16:channel", "int4_w4a8:g128",    "int8_w8a16:g32",     "int8_w8a16:g128",
      "int8_w8a8:channel", "int8_w8a8:block128", "fp8_w8a16:channel", "fp8_w8a16:block128", "unquantized",
      "mxfp8_w8a8_out",    "nvfp4_w4a8_out"};
  const DType scale_types[] = {DType::kF16, DType::kBF16, DType::kF32};
  const std::pair<int64_t, int64_t> sizes[] = {{16, 128}, {37, 1152}, {130, 2944}};
  for (const char* name : schemes) {
    for (const auto& [rows, cols] : sizes) {
      for (const bool zero_points : {false, true}) {
        cpu_test::Layer layer;
        layer.spec.scheme = name;
        layer.scheme = *ParseScheme(name);
        if (layer.scheme.weight.block_scale_dtype == DType::kBF16) {
          layer.scheme.weight.block_scale_dtype = scale_types[rows % 3];
        }
        layer.spec.zero_points = zero_points && layer.scheme.weight.may_have_zero_point;
        if (!layer.scheme.weight.quantized()) {
          layer.spec.weight_dtype = zero_points ? DType::kF16 : DType::kBF16;
          layer.scheme.weight.element = layer.spec.weight_dtype;
        }
        std::mt19937 random(3);
        // Plain weights may end inside a unit of 64.
        const int64_t odd = layer.scheme.weight.quantized() ? 0 : 27;
        CanonicalMatrix matrix = cpu_test::RandomMatrix(layer, rows, cols - odd, random);
        if (matrix.format.element == DType::kF8E4M3) {  // in the middle, and in a tail of columns
          matrix.codes.mutable_view().data()[5 * cols + 70] = std::byte{0x7f};
          matrix.codes.mutable_view().data()[rows * cols - 1] = std::byte{0xff};
        }
        // Half of the matrices without zero points stand among others that have them.
        const bool planned =
            !matrix.zero_point.empty() || (layer.scheme.weight.may_have_zero_point && rows == 37);
        ExpectBytesOfTheDefinition(matrix, *ChoosePanelFormat(matrix.format, planned), name);
        if (matrix.format.block.row == 128) {  // scales of rows, where others of the layer need them
          ExpectBytesOfTheDefinition(matrix, *ChoosePanelFormat(matrix.format, planned, true), name);
        }
        if (!matrix.zero_point.empty()) {  // the same bytes as signed codes and zero points
          matrix.format.element = matrix.format.element == DType::kU4 ? DType::kI4 : DType::kI8;
          ExpectBytesOfTheDefinition(matrix, *ChoosePanelFormat(matrix.format, planned), name);
          matrix.format.element = matrix.format.element == DType::kI4 ? DType::kU4 : DType::kU8;
          CanonicalMatrix floats = matrix;
          testing_support::MakeZerosFloats(floats, random);
          const PanelFormat format = *ChoosePanelFormat(floats.format, planned);
          ExpectBytesOfTheDefinition(floats, format, name);
          ExpectBytesOfTheDefinition(matrix, format, name);  // bytes among others that have numbers
          matrix.zero_point = Tensor();
          ExpectBytesOfTheDefinition(matrix, format, name);
        }
      }
    }
  }
}

/// Any bits for codes, which end where an inaccessible page begins: every code in every place, and nothing is
/// read behind a row. Widths that end inside a step, too.
TEST(PanelPacker_AnyBitsBeforeAGuardPage, BecomeTheBytesOfTheDefinition) {
  const char* const schemes[] = {"w_mxfp6_e3m2", "w_mxfp6_e2m3",   "mxfp8_w8a16",     "fp8_w8a16:channel",
                                 "mxfp4_w4a16",  "int4_w4a16:g32", "int8_w8a16:g128", "unquantized"};
  std::mt19937_64 random(17);
  for (const char* name : schemes) {
    for (const int64_t cols : {128, 384, 1152, 2944}) {
      for (const bool shuffled : {false, true}) {
        cpu_test::Layer layer;
        layer.spec.scheme = name;
        layer.scheme = *ParseScheme(name);
        layer.scheme.weight.element =
            layer.scheme.weight.quantized() ? layer.scheme.weight.element : layer.spec.weight_dtype;
        std::mt19937 values(5);
        CanonicalMatrix matrix = cpu_test::RandomMatrix(layer, 37, cols, values);
        const auto bytes = static_cast<size_t>(matrix.codes.view().total_bytes());
        const auto memory = std::make_shared<cpu_test::Guarded>(bytes);
        std::generate_n(memory->data(), bytes, [&] { return static_cast<std::byte>(random()); });
        matrix.codes =
            Tensor::Borrow(TensorView(memory->data(), matrix.codes.dtype(), matrix.codes.shape()), memory);
        if (shuffled && matrix.format.block.col > 0 && matrix.format.has_block_scale()) {
          testing_support::ShuffleGroups(matrix, random);
        }
        ExpectBytesOfTheDefinition(matrix, *ChoosePanelFormat(matrix.format, false), name);
      }
    }
  }
}

/// Columns that are not in order in the panel: those of activation order, and slices that begin inside a
/// group of scales.
TEST(PanelPacker_ColumnsInAnOrderOfTheirOwn, WritesTheBytesOfTheDefinition) {
  struct Case {
    const char* scheme;
    int64_t first, last;  // columns of a slice
    bool shuffled;
  };
  const Case cases[] = {{"int4_w4a16:g16", 0, 1152, true},       {"int8_w8a16:g16", 8, 1152, false},
                        {"int4_w4a16:g32", 0, 1152, true},       {"int4_w4a16:g128", 0, 1152, true},
                        {"int4_w4a16:g128", 384, 906, true},     {"int4_w4a16:g64", 24, 1150, false},
                        {"int8_w8a16:g32", 0, 1152, true},       {"int8_w8a16:g128", 0, 1152, true},
                        {"int8_w8a16:g128", 77, 1001, false},    {"nvfp4_w4a16", 8, 1144, false},
                        {"mxfp4_w4a16", 12, 950, false},         {"mxfp8_w8a16", 3, 1040, false},
                        {"w_mxfp6_e3m2", 4, 1100, false},        {"w_mxfp6_e2m3", 20, 84, false},
                        {"fp8_w8a16:block128", 100, 1152, false}};
  std::mt19937_64 order(5);
  for (const Case& each : cases) {
    for (const bool zero_points : {false, true}) {
      cpu_test::Layer layer;
      layer.spec.scheme = each.scheme;
      layer.scheme = *ParseScheme(each.scheme);
      layer.spec.zero_points = zero_points && layer.scheme.weight.may_have_zero_point;
      std::mt19937 random(3);
      CanonicalMatrix whole = cpu_test::RandomMatrix(layer, 37, 1152, random);
      if (each.shuffled) {
        testing_support::ShuffleGroups(whole, order);
      }
      const CanonicalMatrix matrix = *SliceMatrix(whole, 0, 37, each.first, each.last - each.first);
      const PanelFormat format = *ChoosePanelFormat(matrix.format, !matrix.zero_point.empty());
      ASSERT_FALSE(PanelColumnsAreIdentity(PanelColumns(matrix, format))) << each.scheme;
      ExpectBytesOfTheDefinition(matrix, format, each.scheme);
      if (!matrix.zero_point.empty()) {
        CanonicalMatrix floats = matrix;
        testing_support::MakeZerosFloats(floats, random);
        ExpectBytesOfTheDefinition(floats, *ChoosePanelFormat(floats.format, true), each.scheme);
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
