#include <cstring>

#include "fragment_case.hpp"
#include "weights/dequantize.hpp"

/// What NaN among codes and scales becomes in fragments.
namespace fusedmoe::fragment_test {
namespace {

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
    if (FragmentTraitsOf(spec.format).scale == FragmentScale::kOffset) {
      continue;  // there is no way back
    }
    CanonicalExpert back = RandomExpert(c, 256, 256, true, generator);
    ASSERT_TRUE(UnpackFragmentExpert(spec, packed.view(), back).ok());
    std::vector<float> again(256);
    back.down.tensor_scale = expert.down.tensor_scale;
    DequantizeRow(back.down, 0, again.data());
    EXPECT_TRUE(std::isnan(again.back())) << c.scheme;
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

}  // namespace
}  // namespace fusedmoe::fragment_test
