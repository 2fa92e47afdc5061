#include <gtest/gtest.h>

#include <fusedmoe/quant_config.hpp>

namespace fusedmoe {
namespace {

const float kOne = 1.0F;
const TensorView kTensor(reinterpret_cast<const std::byte*>(&kOne), DType::kF32, Shape{1});

QuantConfigArguments Weights() {
  QuantConfigArguments arguments;
  arguments.w1_scale = arguments.w2_scale = kTensor;
  return arguments;
}

void ExpectRefused(const Result<QuantConfig>& config, std::initializer_list<const char*> words) {
  ASSERT_FALSE(config.ok());
  for (const char* word : words) {
    EXPECT_NE(config.status().message().find(word), std::string::npos)
        << "'" << config.status().message() << "' does not name " << word;
  }
}

TEST(QuantConfig_PerTokenWithBlocks, IsRefusedNamingBothFields) {
  QuantConfigArguments arguments = Weights();
  arguments.block_shape = GroupShape{128, 128};
  arguments.per_act_token_quant = true;
  ExpectRefused(Fp8W8A8Config(arguments), {"block_shape", "per_act_token_quant"});
  arguments.per_act_token_quant = false;
  arguments.per_out_ch_quant = true;
  ExpectRefused(Fp8W8A8Config(arguments), {"block_shape", "per_out_ch_quant"});
}

TEST(QuantConfig_ShapesThatAreNoBlocks, AreRefused) {
  QuantConfigArguments arguments = Weights();
  arguments.block_shape = kPerRow;
  ExpectRefused(Fp8W8A8Config(arguments), {"block_shape", "per_act_token_quant"});
  arguments.block_shape = kPerTensor;
  ExpectRefused(Fp8W8A8Config(arguments), {"block_shape"});
  arguments.block_shape = GroupShape{128, 0};
  ExpectRefused(Fp8W8A8Config(arguments), {"group shape of a1", "[128, 0]"});
  arguments.group_size = -2;
  arguments.weight_bits = 4;
  ExpectRefused(GptqMarlinConfig(arguments), {"[1, -2]"});
}

TEST(QuantConfig_HalfAPair, IsRefusedNamingTheMissingField) {
  QuantConfigArguments arguments = Weights();
  arguments.a2_scale = kTensor;
  ExpectRefused(Fp8W8A8Config(arguments), {"a1_scale", "a2_scale"});
  arguments = Weights();
  arguments.w1_zp = kTensor;
  ExpectRefused(Int4W4A16Config(arguments), {"w1_zp", "w2_zp"});
  arguments.w2_zp = kTensor;
  EXPECT_TRUE(Int4W4A16Config(arguments).ok());
  ExpectRefused(Fp8W8A16Config(arguments), {"w1_zp", "float8_e4m3fn"});
  ExpectRefused(Fp8W8A8Config({}), {"w1_scale"});
  ExpectRefused(Nvfp4Config(Weights()), {"a1_gscale"});
}

TEST(QuantConfig_WeightBits, OtherThanFourAndEightAreRefusedByName) {
  for (const int bits : {0, 2, 3, 5, 6, 16}) {
    QuantConfigArguments arguments = Weights();
    arguments.weight_bits = bits;
    ExpectRefused(GptqMarlinConfig(arguments), {"weight_bits"});
    ExpectRefused(AwqMarlinConfig(arguments), {std::to_string(bits).c_str()});
  }
}

TEST(QuantConfig_OcpMx, HasNoMxfp8Activations) {
  QuantConfigArguments arguments = Weights();
  arguments.weight_kind = QuantKind::kMxfp8;
  arguments.quant_kind = QuantKind::kMxfp4;
  EXPECT_TRUE(OcpMxConfig(arguments).ok());
  arguments.quant_kind = QuantKind::kMxfp8;
  for (const QuantKind weight : {QuantKind::kNone, QuantKind::kMxfp4, QuantKind::kMxfp8}) {
    arguments.weight_kind = weight;
    ExpectRefused(OcpMxConfig(arguments), {"quant_kind", "'mxfp8'"});
  }
}

TEST(QuantConfig_UnknownFactory, ListsTheKnownOnes) {
  ExpectRefused(MakeQuantConfig("fp3", {}), {"fp3", "fp8_w8a8", "int4_w4afp8"});
}

TEST(QuantConfig_MismatchedDescriptors, AreFoundByValidate) {
  auto config = Fp8W8A8Config(Weights());
  ASSERT_TRUE(config.ok());
  config->a2.kind = QuantKind::kInt8;
  EXPECT_NE(config->Validate().message().find("a2 is 'int8'"), std::string::npos);
  config->a2 = config->a1;
  config->w2.shape = kPerRow;
  EXPECT_NE(config->Validate().message().find("w2"), std::string::npos);
}

TEST(QuantConfig_ScaleShape, CoversPartialBlocks) {
  QuantConfigArguments arguments = Weights();
  arguments.block_shape = GroupShape{128, 128};
  const auto config = Fp8W8A8Config(arguments);
  ASSERT_TRUE(config.ok());
  for (int64_t hidden = 1; hidden <= 300; ++hidden) {
    const auto shape = config->ScaleShape(7, hidden);
    ASSERT_TRUE(shape.has_value());
    EXPECT_EQ((*shape)[0], 7);
    EXPECT_EQ((*shape)[1], hidden <= 128 ? 1 : hidden <= 256 ? 2 : 3) << hidden;
  }
}

TEST(QuantKind_Names, RoundTrip) {
#define FMOE_EXPECT_ROUND_TRIP(id, name, is_torch_dtype) \
  EXPECT_EQ(QuantKindName(QuantKind::id), name);         \
  EXPECT_EQ(ParseQuantKind(name), QuantKind::id);
  FMOE_QUANT_KIND_TABLE(FMOE_EXPECT_ROUND_TRIP)
#undef FMOE_EXPECT_ROUND_TRIP
  EXPECT_FALSE(ParseQuantKind("fp3").has_value());
}

std::string KeysOf(const char* name) {
  const auto scheme = ParseScheme(name);
  if (!scheme.ok()) {
    return scheme.status().ToString();
  }
  std::string names;
  for (const auto& key : {QuantKeyOf(scheme->weight), QuantKeyOf(scheme->activation)}) {
    std::string found = key ? key->ToString() : "none";
    for (const NamedQuantKey& named : QuantKeyTable()) {
      found = key == named.key ? std::string(named.name) : found;
    }
    names += (names.empty() ? "" : " ") + found;
  }
  return names;
}

TEST(QuantKey_OfASchemesFormats, AreUpstreamsKeys) {
  EXPECT_EQ(KeysOf("unquantized"), "none none");
  EXPECT_EQ(KeysOf("fp8_w8a8"), "kFp8StaticChannelSym kFp8DynamicTokenSym");
  EXPECT_EQ(KeysOf("fp8_w8a8:tensor"), "kFp8StaticTensorSym kFp8DynamicTensorSym");
  EXPECT_EQ(KeysOf("fp8_w8a8:tensor_static"), "kFp8StaticTensorSym kFp8StaticTensorSym");
  EXPECT_EQ(KeysOf("fp8_w8a8:block128"), "kFp8Static128BlockSym kFp8Dynamic128Sym");
  EXPECT_EQ(KeysOf("int8_w8a8"), "kInt8StaticChannelSym kInt8DynamicTokenSym");
  EXPECT_EQ(KeysOf("nvfp4_w4a4"), "kNvfp4Static kNvfp4Dynamic");
  EXPECT_EQ(KeysOf("nvfp4_w4a16"), "kNvfp4Static none");
  EXPECT_EQ(KeysOf("mxfp4_w4a4"), "kMxfp4Static kMxfp4Dynamic");
  EXPECT_EQ(KeysOf("mxfp4_mxfp8"), "kMxfp4Static kMxfp8Dynamic");
  EXPECT_EQ(KeysOf("mxfp8_w8a8"), "kMxfp8Static kMxfp8Dynamic");
}

TEST(QuantKey_Asymmetric, SaysSo) {
  const QuantKey key{DType::kU4, {DType::kBF16, true, {1, 64}}, std::nullopt, false};
  EXPECT_EQ(key.ToString(), "QuantKey(u4,scale(bf16,static,GroupShape(row=1, col=64)),asymmetric)");
}

}  // namespace
}  // namespace fusedmoe
