#pragma once

#include <string>
#include <utility>
#include <vector>

#include "moe/activation.hpp"
#include "quant/activation_rules.hpp"

/// What prefill_check runs: small layers, one for each format, activation and option.
namespace fusedmoe::cuda {

struct PrefillCase {
  std::string name;
  std::string scheme = "nvfp4_w4a16";  // or a type of GGUF: stored_types.hpp
  int64_t hidden = 256, intermediate = 192, experts = 6, top_k = 3, tokens = 70;
  ActivationSpec activation = {};
  bool bias = false;
  bool map = false;   // half of the global experts are elsewhere, and some ids are -1
  bool skew = false;  // 90 % of the tokens want expert 0
  bool batched = false;
  bool weight_on_input = false;
  bool per_expert_scale = false;  // static input scales differ by expert
  DType in = DType::kBF16;
  DType out = DType::kBF16;
  DType block_scale = DType::kBF16;  // of integer groups
  int tile = 0;                      // forced
  std::string rule = {};
  int64_t chunk = 0;  // forced
};

inline std::vector<PrefillCase> PrefillCases() {
  std::vector<PrefillCase> cases;
  const auto add = [&cases](PrefillCase c) { cases.push_back(std::move(c)); };
  for (const char* scheme :
       {"nvfp4_w4a16", "mxfp4_w4a16", "int4_w4a16:g128", "int4_w4a16:channel", "fp8_w8a16:channel",
        "fp8_w8a16:tensor", "fp8_w8a16:block128", "int8_w8a16:channel", "mxfp8_w8a16", "int8_w8a16:g32",
        "w_mxfp6_e2m3", "w_mxfp6_e3m2", "q6_k", "iq4", "unquantized"}) {
    for (const int tile : {64, 128}) {
      add({.name = std::string(scheme) + " tile" + std::to_string(tile),
           .scheme = scheme,
           .hidden = 384,
           .intermediate = 256,
           .tokens = 150,
           .tile = tile});
    }
  }
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g64", "int4_w4a16:g128", "int8_w8a16:g128"}) {
    add({.name = std::string(scheme) + " fp32 scales",
         .scheme = scheme,
         .hidden = 256,
         .intermediate = 256,
         .block_scale = DType::kF32});
  }
  // activations, biases, tails
  using enum ActivationKind;
  for (const ActivationKind kind : {kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep, kRelu, kRelu2, kSitu,
                                    kSiluNoMul, kGeluNoMul, kGeluTanhNoMul, kReluNoMul, kRelu2NoMul}) {
    for (const float limit : {0.0F, 0.7F}) {
      add({.name = "activation " + std::to_string(static_cast<int>(kind)) + " limit " + std::to_string(limit),
           .scheme = "mxfp4_w4a16",
           .hidden = 320,
           .intermediate = 160,
           .activation = {.kind = kind, .alpha = 1.702F, .beta = 1.0F, .limit = limit},
           .bias = true});
    }
  }
  for (const char* scheme :
       {"nvfp4_w4a16", "mxfp4_w4a16", "fp8_w8a16:channel", "w_mxfp6_e3m2", "q6_k", "iq4", "unquantized"}) {
    add({.name = std::string(scheme) + " tails",
         .scheme = scheme,
         .hidden = 2880,
         .intermediate = 96,
         .tokens = 33,
         .bias = true});
    add({.name = std::string(scheme) + " odd K",
         .scheme = scheme,
         .hidden = 352,
         .intermediate = 224,
         .tokens = 300});
  }
  add({.name = "bf16 H=200 I=72",
       .scheme = "unquantized",
       .hidden = 200,
       .intermediate = 72,
       .tokens = 40,
       .bias = true});
  add({.name = "bf16 H=203 I=77",
       .scheme = "unquantized",
       .hidden = 203,
       .intermediate = 77,
       .tokens = 40,
       .bias = true});
  add({.name = "int4 g128 I=128 units",
       .scheme = "int4_w4a16:g128",
       .hidden = 384,
       .intermediate = 128,
       .tokens = 40});
  add({.name = "fp8 block I=192 padding slab",
       .scheme = "fp8_w8a16:block128",
       .hidden = 320,
       .intermediate = 192,
       .tokens = 90});
  // routing
  add({.name = "map and -1", .experts = 10, .tokens = 300, .map = true});
  add({.name = "skew", .experts = 16, .tokens = 900, .skew = true});
  add({.name = "skew tile64", .experts = 16, .tokens = 900, .skew = true, .tile = 64});
  add({.name = "512 experts", .hidden = 128, .intermediate = 64, .experts = 512, .top_k = 10, .tokens = 200});
  add({.name = "top_k 32", .hidden = 128, .intermediate = 64, .experts = 64, .top_k = 32, .tokens = 300});
  add({.name = "one token", .tokens = 1});
  add({.name = "many chunks of routes",
       .hidden = 64,
       .intermediate = 64,
       .experts = 40,
       .top_k = 8,
       .tokens = 3000});
  add({.name = "passes of 256", .hidden = 128, .intermediate = 64, .tokens = 700, .chunk = 256});
  add({.name = "batched", .tokens = 60, .batched = true, .out = DType::kF32});
  add({.name = "batched fp8",
       .scheme = "fp8_w8a8:channel",
       .tokens = 60,
       .batched = true,
       .out = DType::kF32});
  // rows of codes that two, four, eight and sixteen warps hold
  for (const char* scheme : {"fp8_w8a8:channel", "int8_w8a8:channel"}) {
    for (const auto& [hidden, intermediate] : {std::pair{1152, 2112}, {4224, 8256}}) {
      add({.name = std::string("wide rows ") + scheme + " " + std::to_string(hidden),
           .scheme = scheme,
           .hidden = hidden,
           .intermediate = intermediate,
           .experts = 1,
           .top_k = 1,
           .tokens = 5});
    }
  }
  // dtypes
  add({.name = "f32 in, f32 out", .in = DType::kF32, .out = DType::kF32});
  add({.name = "f16 in and out", .in = DType::kF16, .out = DType::kF16});
  add({.name = "f16 weights", .scheme = "f16", .in = DType::kF16, .out = DType::kF16});
  add({.name = "weight on input", .top_k = 1, .weight_on_input = true, .out = DType::kF32});
  // quantized activations
  for (const char* scheme :
       {"nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a8:static", "mxfp4_w4a8:dynamic", "mxfp8_w8a8",
        "fp8_w8a8:channel", "fp8_w8a8:tensor", "fp8_w8a8:tensor_static", "fp8_w8a8:tensor_token",
        "fp8_w8a8:block128", "int8_w8a8:channel", "int8_w8a8:channel_static", "int4_w4a8:g128",
        "int4_w4a8:g32", "nvfp4_w4a8:g16", "w_mxfp4_a_mxfp6_e3m2", "w_mxfp6_e2m3_a_mxfp6_e2m3",
        "mxfp4_w4a8_out:out16_tensor"}) {
    add({.name = std::string("quantized ") + scheme,
         .scheme = scheme,
         .hidden = 384,
         .intermediate = 256,
         .tokens = 130});
  }
  // codes by codes: tiles of both sizes, an odd slab of 64 at the end of either K, long sums, options
  for (const char* scheme : {"fp8_w8a8:channel", "fp8_w8a8:tensor_static", "fp8_w8a8:block128",
                             "int8_w8a8:channel", "int8_w8a8:tensor_static"}) {
    for (const int tile : {64, 128}) {
      const std::string name = std::string(scheme) + " codes tile" + std::to_string(tile);
      add({.name = name, .scheme = scheme, .hidden = 320, .intermediate = 192, .tokens = 350, .tile = tile});
      add({.name = name + " long",
           .scheme = scheme,
           .hidden = 4096,
           .intermediate = 1024,
           .experts = 4,
           .top_k = 2,
           .tokens = 150,
           .tile = tile});
      add({.name = name + " oai, bias, map",
           .scheme = scheme,
           .tokens = 400,
           .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
           .bias = true,
           .map = true,
           .tile = tile});
    }
    add({.name = std::string(scheme) + " codes gelu",
         .scheme = scheme,
         .tokens = 200,
         .activation = {.kind = kGelu}});
    add({.name = std::string(scheme) + " codes batched",
         .scheme = scheme,
         .tokens = 60,
         .batched = true,
         .out = DType::kF32});
    add({.name = std::string(scheme) + " codes skew",
         .scheme = scheme,
         .experts = 16,
         .tokens = 900,
         .skew = true});
    add({.name = std::string(scheme) + " codes passes", .scheme = scheme, .tokens = 700, .chunk = 256});
  }
  add({.name = "fp8_w8a8:tensor_static codes per expert",
       .scheme = "fp8_w8a8:tensor_static",
       .tokens = 200,
       .per_expert_scale = true});
  add({.name = "nvfp4_w4a4 per expert, oai",
       .scheme = "nvfp4_w4a4",
       .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
       .bias = true,
       .map = true,
       .per_expert_scale = true});
  // as values: in 128-token tiles quantized there, in those of 64 between the GEMMs; groups of 16 and 32 and
  // none, tails, odd K, options
  for (const char* scheme :
       {"nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "mxfp4_w4a8:static", "mxfp8_w8a8", "nvfp4_w4a8:g16",
        "w_mxfp6_e2m3_a_mxfp6_e2m3", "mxfp8_w8a8_out", "nvfp4_w4a8_out"}) {
    for (const int64_t tokens : {60, 350}) {
      const std::string name = std::string(scheme) + " values of " + std::to_string(tokens);
      add({.name = name, .scheme = scheme, .hidden = 320, .intermediate = 192, .tokens = tokens});
      add({.name = name + " tails",
           .scheme = scheme,
           .hidden = 2880,
           .intermediate = 96,
           .tokens = tokens,
           .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
           .bias = true,
           .map = true});
    }
    add({.name = std::string(scheme) + " values gelu",
         .scheme = scheme,
         .tokens = 200,
         .activation = {.kind = kGelu}});
    add({.name = std::string(scheme) + " values batched",
         .scheme = scheme,
         .tokens = 200,
         .batched = true,
         .out = DType::kF32});
  }
  // rows that wait for their scales, activated already
  for (const char* scheme : {"int8_w8a8:channel", "int4_w4a8:channel", "int4_w4a8:g128"}) {
    add({.name = std::string(scheme) + " activated oai",
         .scheme = scheme,
         .intermediate = 256,
         .tokens = 400,
         .activation = {.kind = kSwigluOai, .alpha = 1.702F, .beta = 1.0F, .limit = 7.0F},
         .bias = true,
         .map = true});
  }
  for (const NamedActivationRule& rule : ActivationRuleTable()) {
    const std::string name(rule.name);
    const char* scheme = name.find("int8") != std::string::npos
                             ? (name.find("group") != std::string::npos    ? "int8_w8a8:block128"
                                : name.find("tensor") != std::string::npos ? "int8_w8a8:channel_tensor"
                                                                           : "int8_w8a8:channel")
                         : name.find("nvfp4") != std::string::npos ? "nvfp4_w4a4"
                         : name.find("mxfp8") != std::string::npos ? "mxfp8_w8a8"
                         : name.find("mx") != std::string::npos    ? "mxfp4_w4a4"
                         : name.find("group") != std::string::npos || name.find("block") != std::string::npos
                             ? "fp8_w8a8:block128"
                         : name.find("tensor") != std::string::npos ? "fp8_w8a8:tensor"
                                                                    : "fp8_w8a8:channel";
    add({.name = "rule " + name,
         .scheme = scheme,
         .hidden = 256,
         .intermediate = 128,
         .tokens = 40,
         .rule = name});
  }
  return cases;
}

}  // namespace fusedmoe::cuda
