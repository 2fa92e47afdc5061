#include <algorithm>

#include "checkpoint/matrices/unpack.hpp"
#include "quant/activation_rules.hpp"
#include "quant/packing.hpp"
#include "quant/reference_generators.hpp"
#include "vectors/quantize_support.hpp"
#include "weights/dequantize.hpp"
#include "weights/marlin.hpp"

namespace fusedmoe::golden {
namespace {

Outcome CompareResult(const GoldenCase& golden_case, const char* name, const Result<Tensor>& produced) {
  if (!golden_case.Has(name)) {
    return std::nullopt;
  }
  return produced.ok() ? golden_case.Compare(name, produced->view())
                       : std::string(name) + ": " + produced.status().ToString();
}

/// The inverse must give back an input of the case.
Outcome CompareInverse(const GoldenCase& golden_case, const char* input, const Result<Tensor>& restored) {
  if (!restored.ok()) {
    return std::string(input) + " restored: " + restored.status().ToString();
  }
  const Outcome outcome = golden_case.Compare(input, restored->view());
  return outcome ? Outcome("restored: " + *outcome) : outcome;
}

/// `other` is the rule of device kernels, whose codes stand beside those of the reference in some cases.
Outcome Int8Activations(const GoldenCase& golden_case, const ActivationFormat& format,
                        std::optional<float> scale, const ActivationFormat& other = {},
                        const char* other_name = "") {
  QuantizedCase result = QuantizeTensor(format, scale, golden_case.Input("x"));
  if (result.failure) {
    return result.failure;
  }
  Outcome outcome = golden_case.Compare("codes", result.codes.view());
  if (!outcome && !scale) {
    outcome = IsPerTensor(format) ? golden_case.CompareFloats("scale", {result.tensor_scale})
                                  : golden_case.Compare("scale", result.scales.view());
  }
  if (!outcome && golden_case.Has(other_name) && other_name[0] != '\0') {
    QuantizedCase rounded = QuantizeTensor(other, scale, golden_case.Input("x"));
    outcome = rounded.failure ? rounded.failure : golden_case.Compare(other_name, rounded.codes.view());
  }
  return outcome;
}

ActivationFormat Int8(GroupShape group, const char* rule) {
  return {.element = DType::kI8, .group = group, .rule = *ActivationRuleByName(rule)};
}

Outcome BlockDequantize(const GoldenCase& golden_case) {
  const auto& block = golden_case.parameters().at("block");
  CanonicalMatrix matrix;
  const TensorView codes = golden_case.Input("codes");
  matrix.rows = codes.dim(0);
  matrix.cols = codes.dim(1);
  matrix.format = {.element = DType::kI8, .block = {block[0].get<int64_t>(), block[1].get<int64_t>()}};
  matrix.codes = Tensor::Borrow(codes, nullptr);
  matrix.block_scale = Tensor::Borrow(golden_case.Input("scale"), nullptr);
  return CompareResult(golden_case, "decoded", DequantizeMatrix(matrix));
}

Outcome QuantizeWeightsReference(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  const auto type = ParseIntegerType(parameters.at("type").get<std::string>());
  if (!type) {
    return "unknown integer type";
  }
  const auto result =
      QuantizeIntegerReference(golden_case.Input("w"), *type, parameters.at("group").get<int64_t>(),
                               parameters.at("zero_point").get<bool>());
  if (!result.ok()) {
    return result.status().ToString();
  }
  Outcome outcome;
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor*>{"codes", &result->codes},
                                     {"scale", &result->scale},
                                     {"zero_point", &result->zero_point},
                                     {"decoded", &result->decoded}}) {
    if (!outcome && golden_case.Has(name)) {
      outcome = tensor->empty() ? std::string(name) + " was not produced"
                                : golden_case.Compare(name, tensor->view());
    }
  }
  return outcome;
}

/// The same memory under another type and shape; sizes agree.
Tensor Reread(const Tensor& tensor, DType dtype, const Shape& shape) {
  return Tensor::Borrow(TensorView(tensor.view().data(), dtype, shape), tensor.owner());
}

/// Each nibble minus 8, in two's complement.
Result<Tensor> FlipSignsOfWords(TensorView words) {
  const Shape nibbles{words.dim(0), words.dim(1) * 8};
  FMOE_ASSIGN_OR_RETURN(const Tensor flipped, FlipSigns(TensorView(words.data(), DType::kU4, nibbles)));
  return Reread(flipped, words.dtype(), words.shape());
}

Outcome Pack(const GoldenCase& golden_case) {
  const int bits = golden_case.parameters().at("bits").get<int>();
  const TensorView codes = golden_case.Input("codes");
  const WordLayout in_order{.bits = bits}, awq_order{bits, LaneOrder::kAwq};
  const auto gptq = PackRows(codes, in_order);
  const auto columns = PackColumns(codes, in_order);
  const auto awq = PackColumns(codes, awq_order);
  Outcome outcome =
      FirstOf({CompareResult(golden_case, "gptq", gptq), CompareResult(golden_case, "columns", columns),
               CompareResult(golden_case, "awq", awq)});
  if (outcome) {
    return outcome;
  }
  if (golden_case.Has("gptq_signed")) {
    outcome = CompareResult(golden_case, "gptq_signed", FlipSignsOfWords(gptq->view()));
  }
  const int64_t cols = codes.dim(1);
  return FirstOf({outcome,
                  CompareInverse(golden_case, "codes", UnpackRows(gptq->view(), in_order, codes.dim(0))),
                  CompareInverse(golden_case, "codes", UnpackColumns(columns->view(), in_order, cols)),
                  CompareInverse(golden_case, "codes", UnpackColumns(awq->view(), awq_order, cols))});
}

/// Signed values to codes with the offset 2^(bits - 1), and back.
Tensor Offset(TensorView values, int bits, DType dtype) {
  auto shifted = Tensor::Allocate(dtype, values.shape());
  for (int64_t i = 0; i < values.count(); ++i) {
    const int offset = dtype == DType::kU8 ? 1 << (bits - 1) : -(1 << (bits - 1));
    const int value = values.dtype() == DType::kI8 ? values.as<int8_t>()[i] : values.as<uint8_t>()[i];
    shifted->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(value + offset);
  }
  return *std::move(shifted);
}

Outcome CompressedTensors(const GoldenCase& golden_case) {
  const int bits = golden_case.parameters().at("bits").get<int>();
  const TensorView values = golden_case.Input("values");
  const Tensor codes = Offset(values, bits, DType::kU8);
  const auto packed = PackColumns(codes.view(), {.bits = bits});
  if (Outcome outcome = CompareResult(golden_case, "packed", packed)) {
    return outcome;
  }
  checkpoint::LinearFormat format;
  format.packing = checkpoint::Packing::kBits;
  format.bits = bits;
  format.weight.element = bits == 4 ? DType::kU4 : DType::kU8;
  const auto unpacked = checkpoint::UnpackCodes(format, *packed, values.dim(0), values.dim(1), true);
  if (!unpacked.ok()) {
    return unpacked.status().ToString();
  }
  const auto wide = WidenCodes(unpacked->view());
  return CompareInverse(golden_case, "values", Offset(wide->view(), bits, DType::kI8));
}

/// Files of GPTQ and AWQ as the loader reads them; written back; zero points as the kernels of moe_wna16 want
/// them, which are pairs of rows.
Outcome Wna16(const GoldenCase& golden_case, bool awq) {
  const auto borrow = [&](const char* name) { return Tensor::Borrow(golden_case.Input(name), nullptr); };
  checkpoint::LinearFormat format, pairs;
  format.packing = awq ? checkpoint::Packing::kAwq : checkpoint::Packing::kGptq;
  pairs.packing = checkpoint::Packing::kRowPairs;
  format.bits = pairs.bits = 4;
  format.weight.element = pairs.weight.element = DType::kU4;
  format.zero_plus_one = !awq;
  const Tensor qweight = borrow("qweight"), qzeros = borrow("qzeros");
  const int64_t rows = 8 * qzeros.dim(1), groups = qzeros.dim(0);
  const auto weight =
      checkpoint::UnpackCodes(format, qweight, rows, awq ? qweight.dim(0) : 8 * qweight.dim(0), true);
  const auto zeros = checkpoint::UnpackZeroPoints(format, qzeros, rows, groups);
  const auto paired = checkpoint::UnpackCodes(pairs, borrow("zero"), rows, groups, true);
  if (!weight.ok() || !zeros.ok() || !paired.ok()) {
    return weight.status().ToString() + "; " + zeros.status().ToString() + "; " + paired.status().ToString();
  }
  const auto turned = Transpose(zeros->view());
  const auto turned_pairs = Transpose(WidenCodes(paired->view())->view());
  const auto codes = Transpose(WidenCodes(weight->view())->view());
  Tensor stored_zeros = *turned;
  if (!awq) {
    stored_zeros = *Tensor::Allocate(DType::kU8, turned->shape());
    const auto* from = turned->view().as<uint8_t>();
    std::transform(from, from + turned->shape().count(), stored_zeros.mutable_view().as<uint8_t>(),
                   [](uint8_t zero) { return static_cast<uint8_t>((zero - 1) & 15); });
  }
  const WordLayout layout{4, awq ? LaneOrder::kAwq : LaneOrder::kSequential};
  return FirstOf(
      {CompareResult(golden_case, "weight", weight), CompareResult(golden_case, "codes", codes),
       CompareResult(golden_case, "zero_points", turned),
       CompareResult(golden_case, "effective_zero_points", turned),
       CompareInverse(golden_case, golden_case.Has("zero_points") ? "zero_points" : "effective_zero_points",
                      turned_pairs),
       CompareInverse(golden_case, "qweight",
                      awq ? PackColumns(codes->view(), layout) : PackRows(codes->view(), layout)),
       CompareInverse(golden_case, "qzeros", PackColumns(stored_zeros.view(), layout))});
}

Outcome CompareIndices(const GoldenCase& golden_case, const char* name, const std::vector<int32_t>& indices) {
  return golden_case.Has(name) ? golden_case.CompareIntegers(name, {indices.begin(), indices.end()})
                               : std::nullopt;
}

MarlinKind KindOf(const GoldenCase& golden_case) {
  // Cases without the activation width in their parameters carry it in their name ("..._a8").
  const auto& parameters = golden_case.parameters();
  const bool named_a8 = golden_case.name().find("_a8") != std::string::npos;
  return {parameters.value("bits", 4), parameters.value("activation_bits", named_a8 ? 8 : 16)};
}

Outcome MarlinWeights(const GoldenCase& golden_case) {
  const MarlinKind kind = KindOf(golden_case);
  const auto packed = MarlinPackWeights(golden_case.Input("codes"), kind);
  Outcome outcome = FirstOf({CompareIndices(golden_case, "permutation", MarlinWeightPermutation(kind)),
                             CompareResult(golden_case, "packed", packed)});
  return outcome ? outcome : CompareInverse(golden_case, "codes", MarlinUnpackWeights(packed->view(), kind));
}

Outcome MarlinScales(const GoldenCase& golden_case) {
  const auto& parameters = golden_case.parameters();
  const bool grouped = MarlinScalesAreGrouped(parameters.at("K").get<int64_t>(),
                                              parameters.at("group").get<int64_t>(), KindOf(golden_case));
  const auto permuted = MarlinPermuteScales(golden_case.Input("scale"), grouped);
  Outcome outcome = CompareResult(golden_case, "permuted", permuted);
  return outcome ? outcome
                 : CompareInverse(golden_case, "scale", MarlinRestoreScales(permuted->view(), grouped));
}

Outcome MarlinZeroPoints(const GoldenCase& golden_case) {
  const MarlinKind kind = KindOf(golden_case);
  const TensorView zero_points = golden_case.Input("zero_points");
  const auto packed = MarlinPackZeroPoints(zero_points, kind);
  Outcome outcome = CompareResult(golden_case, "packed", packed);
  if (!outcome && golden_case.Has("awq")) {
    outcome = CompareInverse(
        golden_case, "zero_points",
        UnpackColumns(golden_case.Input("awq"), {kind.bits, LaneOrder::kAwq}, zero_points.dim(1)));
  }
  return outcome ? outcome
                 : CompareInverse(golden_case, "zero_points", MarlinUnpackZeroPoints(packed->view(), kind));
}

Outcome MarlinInt8(const GoldenCase& golden_case) {
  const TensorView scale = golden_case.Input("scale");
  const std::vector<float> values = golden_case.Floats("scale");
  const auto result =
      MarlinScalesForInt8Activations(scale, *std::max_element(values.begin(), values.end()), scale.dtype());
  if (!result.ok()) {
    return result.status().ToString();
  }
  return FirstOf({golden_case.Compare("codes", result->codes.view()),
                  golden_case.CompareFloats("factor", {result->factor})});
}

Outcome TwoLevel(const GoldenCase& golden_case) {
  const TensorView scale = golden_case.Input("scale");
  const int64_t groups = scale.dim(scale.rank() - 1);
  const TensorView rows(scale.data(), scale.dtype(), Shape{scale.count() / groups, groups});
  const auto result = DeriveTwoLevelScales(rows);
  if (!result.ok()) {
    return result.status().ToString();
  }
  return FirstOf({golden_case.Compare("group_scale", result->group_scale.view()),
                  golden_case.Compare("channel_scale", result->channel_scale.view())});
}

}  // namespace

Outcome RunInteger(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  const auto& parameters = golden_case.parameters();
  if (name.starts_with("int8_token")) {
    ActivationFormat format = Int8(kPerRow, "exact");
    format.rule.multiply_by_reciprocal = true;
    return Int8Activations(golden_case, format, std::nullopt, Int8(kPerRow, "vllm_int8_token"),
                           "codes_half_away");
  }
  if (name.starts_with("int8_tensor_static")) {
    ActivationFormat format = Int8(kPerTensor, "exact");
    format.static_tensor_scale = true;
    return Int8Activations(golden_case, format, golden_case.Floats("scale").at(0));
  }
  if (name.starts_with("int8_tensor")) {
    return Int8Activations(golden_case, Int8(kPerTensor, "vllm_int8_tensor"), std::nullopt);
  }
  if (name.starts_with("int8_group")) {
    const ActivationFormat device = Int8({1, parameters.at("group").get<int64_t>()}, "vllm_int8_group");
    ActivationFormat format = device;
    format.rule.int_rounding = IntRounding::kHalfEven;
    return Int8Activations(golden_case, format, std::nullopt, device, "codes_truncated");
  }
  if (name.starts_with("int8_block_dequantize")) {
    return BlockDequantize(golden_case);
  }
  if (name.starts_with("quantize_")) {
    return QuantizeWeightsReference(golden_case);
  }
  if (name.starts_with("pack_")) {
    return Pack(golden_case);
  }
  if (name.starts_with("compressed_tensors")) {
    return CompressedTensors(golden_case);
  }
  if (name.starts_with("wna16_from_")) {
    return Wna16(golden_case, name.find("awq") != std::string::npos);
  }
  if (name.starts_with("marlin_weights")) {
    return MarlinWeights(golden_case);
  }
  if (name.starts_with("marlin_scales")) {
    return MarlinScales(golden_case);
  }
  if (name.starts_with("marlin_bias")) {
    return FirstOf({CompareResult(golden_case, "permuted", MarlinPermuteBias(golden_case.Input("bias"))),
                    CompareIndices(golden_case, "permutation_grouped", MarlinGroupedScalePermutation()),
                    CompareIndices(golden_case, "permutation_single", MarlinSingleScalePermutation())});
  }
  if (name.starts_with("marlin_zero_points")) {
    return MarlinZeroPoints(golden_case);
  }
  if (name.starts_with("marlin_int8_activation_scales")) {
    return MarlinInt8(golden_case);
  }
  if (name.starts_with("w4a8_fp8_scales")) {
    return TwoLevel(golden_case);
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
