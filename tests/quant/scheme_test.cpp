#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include <fusedmoe/quant.hpp>

namespace fusedmoe {
namespace {

TEST(Scheme_Table, HoldsEveryNameOnce) {
  std::set<std::string_view> names;
  for (const SchemeInfo& info : SchemeTable()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name << " stands twice";
    EXPECT_FALSE(info.what.empty()) << info.name;
  }
  for (const char* name : {"unquantized",
                           "fp8_w8a8",
                           "fp8_w8a16",
                           "int8_w8a8",
                           "int8_w8a16",
                           "int4_w4a16",
                           "int4_w4a8",
                           "int4_w4afp8",
                           "nvfp4_w4a4",
                           "nvfp4_w4a16",
                           "nvfp4_w4a8",
                           "mxfp8_w8a8",
                           "mxfp8_w8a16",
                           "mxfp4_w4a16",
                           "mxfp4_w4a4",
                           "mxfp4_mxfp8",
                           "mxfp4_w4a8",
                           "w_mxfp4",
                           "w_mxfp4_a_mxfp4",
                           "w_mxfp4_a_mxfp6_e3m2",
                           "w_mxfp4_a_mxfp6_e2m3",
                           "w_mxfp4_a_fp8",
                           "w_mxfp6_e3m2",
                           "w_mxfp6_e3m2_a_mxfp6_e3m2",
                           "w_mxfp6_e3m2_a_fp8",
                           "w_mxfp6_e2m3",
                           "w_mxfp6_e2m3_a_mxfp6_e2m3",
                           "w_mxfp6_e2m3_a_fp8"}) {
    EXPECT_EQ(names.count(name), 1U) << name;
  }
}

TEST(Scheme_EveryNameAndGranularity, ParsesAndItsFormatsNameItAgain) {
  std::vector<std::string> names = SchemeNames();
  for (const SchemeInfo& info : SchemeTable()) {
    names.emplace_back(info.name);
  }
  for (const std::string& name : names) {
    const auto scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    EXPECT_EQ(scheme->name, name);
    const auto found = SchemeNameFor(scheme->weight, scheme->activation);
    ASSERT_TRUE(found.ok()) << name << ": " << found.status().ToString();
    const auto again = ParseScheme(*found);
    ASSERT_TRUE(again.ok()) << *found;
    EXPECT_EQ(again->weight, scheme->weight) << name << " came back as " << *found;
    EXPECT_EQ(again->activation, scheme->activation) << name << " came back as " << *found;
  }
}

TEST(Scheme_CanonicalNames, RoundTripByName) {
  for (const char* name : {"unquantized",
                           "fp8_w8a8",
                           "fp8_w8a8:tensor",
                           "fp8_w8a8:tensor_static",
                           "fp8_w8a8:block128",
                           "fp8_w8a8:block64x32",
                           "fp8_w8a8:channel_static",
                           "fp8_w8a16",
                           "fp8_w8a16:block128",
                           "int8_w8a8",
                           "int8_w8a8:tensor",
                           "int8_w8a8:block32",
                           "int8_w8a16",
                           "int8_w8a16:g64",
                           "int4_w4a16",
                           "int4_w4a16:g32",
                           "int4_w4a16:channel",
                           "int4_w4a16:g256",
                           "int4_w4a8",
                           "int4_w4afp8",
                           "nvfp4_w4a4",
                           "nvfp4_w4a16",
                           "nvfp4_w4a8",
                           "nvfp4_w4a8:g16",
                           "mxfp8_w8a8",
                           "mxfp8_w8a16",
                           "mxfp4_w4a16",
                           "mxfp4_w4a4",
                           "mxfp4_mxfp8",
                           "mxfp4_w4a8",
                           "mxfp4_w4a8:dynamic",
                           "mxfp4_w4a8:group128",
                           "mxfp4_w4a8:group64",
                           "w_mxfp4_a_mxfp6_e3m2",
                           "w_mxfp6_e2m3_a_fp8"}) {
    const auto scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    const auto found = SchemeNameFor(scheme->weight, scheme->activation);
    ASSERT_TRUE(found.ok()) << found.status().ToString();
    EXPECT_EQ(*found, name);
  }
}

TEST(Scheme_UnknownGranularity, IsRefusedWithAllThatAreAccepted) {
  EXPECT_TRUE(ParseScheme("int4_w4a16:g100").ok());
  EXPECT_EQ(
      ParseScheme("int4_w4a16:row").status().message(),
      "scheme 'int4_w4a16' has no granularity 'row', it has: g128,g64,g32,g16,channel, gSIZE of any size");
  EXPECT_EQ(
      ParseScheme("fp8_w8a16:row").status().message(),
      "scheme 'fp8_w8a16' has no granularity 'row', it has: channel,tensor,block128, blockROWSxCOLUMNS of "
      "any size");
  EXPECT_EQ(ParseScheme("nvfp4_w4a16:g16").status().message(),
            "scheme 'nvfp4_w4a16' has no granularity 'g16', it has: none");
}

TEST(Scheme_GroupsOfActivations, LieBesideThoseOfTheWeights) {
  const auto scheme = ParseScheme("mxfp4_w4a8:group128");
  ASSERT_TRUE(scheme.ok());
  EXPECT_EQ(scheme->weight, ParseScheme("mxfp4_w4a16")->weight);
  EXPECT_EQ(scheme->activation.element, DType::kF8E4M3);
  EXPECT_EQ(scheme->activation.group, (GroupShape{1, 128}));
  EXPECT_EQ(scheme->activation.scale_dtype, DType::kF8E8M0) << "as those of the weights";
  EXPECT_EQ(scheme->activation.rule.mx_scale, MxScaleRule::kCeil);
  EXPECT_FALSE(scheme->activation.static_tensor_scale);
  ActivationFormat real_scales = scheme->activation;
  real_scales.scale_dtype = DType::kF32;
  EXPECT_EQ(*SchemeNameFor(scheme->weight, real_scales), "mxfp4_w4a8:group128");
  EXPECT_EQ(ParseScheme("mxfp4_w4a8:row").status().message(),
            "scheme 'mxfp4_w4a8' has no granularity 'row', it has: static,dynamic,group128, groupSIZE of any "
            "size");
}

TEST(Scheme_BareNames, HaveTheDocumentedGranularity) {
  const auto fp8 = ParseScheme("fp8_w8a8");
  ASSERT_TRUE(fp8.ok());
  EXPECT_TRUE(fp8->weight.has_channel_scale);
  EXPECT_FALSE(fp8->weight.has_tensor_scale);
  EXPECT_EQ(fp8->activation.group, kPerRow);
  EXPECT_FALSE(fp8->activation.static_tensor_scale);
  const auto block = ParseScheme("fp8_w8a8:block128");
  ASSERT_TRUE(block.ok());
  EXPECT_EQ(block->weight.block, (GroupShape{128, 128}));
  EXPECT_EQ(block->activation.group, (GroupShape{1, 128}));
  const auto int4 = ParseScheme("int4_w4a16");
  ASSERT_TRUE(int4.ok());
  EXPECT_EQ(int4->weight.block, (GroupShape{1, 128}));
  EXPECT_EQ(int4->weight.implied_zero(), 8);
  const auto two_level = ParseScheme("int4_w4afp8");
  ASSERT_TRUE(two_level.ok());
  EXPECT_EQ(two_level->weight.element, DType::kI4);
  EXPECT_EQ(two_level->weight.block_scale_dtype, DType::kF8E4M3);
  EXPECT_TRUE(two_level->weight.has_channel_scale);
  EXPECT_EQ(two_level->weight.implied_zero(), 0);
}

TEST(Scheme_BareInt4, TakesTheLargestGroupThatDivides) {
  const auto word = [](std::initializer_list<int64_t> sizes) {
    const auto scheme = ParseScheme("int4_w4a16", std::vector<int64_t>(sizes));
    return scheme.ok() ? scheme->name : scheme.status().ToString();
  };
  EXPECT_EQ(word({2048, 768}), "int4_w4a16");
  EXPECT_EQ(word({2048, 704}), "int4_w4a16:g64");
  EXPECT_EQ(word({2048, 96}), "int4_w4a16:g32");
  EXPECT_EQ(word({2048, 40}), "int4_w4a16:channel");
  const auto named = ParseScheme("int4_w4a16:g128", std::vector<int64_t>{40});
  ASSERT_TRUE(named.ok());
  EXPECT_EQ(named->weight.block.col, 128) << "a granularity that was asked for is kept";
}

TEST(Scheme_UnknownNames, AreUsageErrorsThatListTheKnownOnes) {
  const auto unknown = ParseScheme("fp3_w3a3");
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.status().code(), StatusCode::kUsage);
  EXPECT_NE(unknown.status().message().find("nvfp4_w4a4"), std::string::npos);
  for (const char* name : {"",
                           ":",
                           "nvfp4_w4a4:",
                           "nvfp4_w4a4:g16",
                           "fp8_w8a8:g",
                           "fp8_w8a8:g128",
                           "fp8_w8a8:blockx",
                           "fp8_w8a8:block128x",
                           "fp8_w8a8:block0",
                           "fp8_w8a8:block-1",
                           "fp8_w8a8:block1e9",
                           "int4_w4a16:g0",
                           "int4_w4a16:g99999999999999999999",
                           "int4_w4a16:tensor",
                           "fp8_w8a8:block128_static",
                           "fp8_w8a8:channel_",
                           "mxfp4_w4a8:tensor",
                           "mxfp4_w4a8:group",
                           "mxfp4_w4a8:group0",
                           "mxfp4_w4a8:group128_static",
                           "fp8_w8a8:group128",
                           "w_mxfp4_a_fp8:group128"}) {
    const auto scheme = ParseScheme(name);
    ASSERT_FALSE(scheme.ok()) << name;
    EXPECT_EQ(scheme.status().code(), StatusCode::kUsage) << name;
  }
}

TEST(Scheme_StorageDetails, DoNotChangeTheName) {
  auto scheme = ParseScheme("int4_w4a16:g32");
  ASSERT_TRUE(scheme.ok());
  scheme->weight.block_scale_dtype = DType::kF16;
  scheme->weight.may_have_zero_point = false;
  scheme->weight.element = DType::kI4;
  EXPECT_EQ(*SchemeNameFor(scheme->weight, scheme->activation), "int4_w4a16:g32");
  auto block = ParseScheme("fp8_w8a8:block128");
  ASSERT_TRUE(block.ok());
  block->weight.block_scale_dtype = DType::kF8E8M0;
  block->activation.rule.power_of_two_scale = true;
  EXPECT_EQ(*SchemeNameFor(block->weight, block->activation), "fp8_w8a8:block128");
}

TEST(Scheme_PairsWithoutName, AreUnsupportedAndDescribed) {
  const WeightFormat weight{.element = DType::kF8E5M2, .has_channel_scale = true};
  const auto name = SchemeNameFor(weight, ActivationFormat{});
  ASSERT_FALSE(name.ok());
  EXPECT_EQ(name.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(name.status().message().find("F8_E5M2, F32 scale per row"), std::string::npos)
      << name.status().message();
}

}  // namespace
}  // namespace fusedmoe
