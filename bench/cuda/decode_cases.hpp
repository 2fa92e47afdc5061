#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include <fusedmoe/dtype.hpp>

#include "moe/activation.hpp"

/// What decode_check runs: small layers, one for each format, activation and option.
namespace fusedmoe::cuda {

struct DecodeCase {
  std::string scheme;  // or a type of GGUF: stored_types.hpp
  bool zero_points = false;
  DType scale = DType::kBF16;  // of integer groups; of unquantized weights: their type
  int64_t hidden = 256, intermediate = 128, experts = 8, top_k = 2, tokens = 5;
  ActivationSpec activation = {};
  bool bias = false;
  bool map = false;      // half of the global experts are elsewhere
  bool batched = false;  // `tokens` rows an expert, some beyond its count
  bool weight_on_input = false;
  bool by_route = false;  // a token row a route
  bool skew = false;      // nine routes of ten want expert 1
  DType output = DType::kF32;
};

inline std::string NameOf(const DecodeCase& c) {
  char text[256];
  std::snprintf(text, sizeof text, "%s%s H%ld I%ld E%ld k%ld M%ld act%d%s%s%s%s%s%s out%d", c.scheme.c_str(),
                c.zero_points ? "+zp" : "", c.hidden, c.intermediate, c.experts, c.top_k, c.tokens,
                static_cast<int>(c.activation.kind), c.bias ? " bias" : "", c.map ? " map" : "",
                c.batched ? " batched" : "", c.weight_on_input ? " on-input" : "",
                c.by_route ? " by-route" : "", c.skew ? " skew" : "", static_cast<int>(c.output));
  return text;
}

inline std::vector<DecodeCase> DecodeCases() {
  std::vector<DecodeCase> cases;
  const auto add = [&cases](DecodeCase c) { cases.push_back(std::move(c)); };
  const std::vector<DecodeCase> formats = {{"nvfp4_w4a16"},
                                           {"mxfp4_w4a16"},
                                           {"int4_w4a16:g128"},
                                           {"int4_w4a16:g128", false, DType::kF16},
                                           {"int4_w4a16:g128", true},
                                           {"int4_w4a16:g64", true},
                                           {"int4_w4a16:g32", true},
                                           {"int4_w4a16:channel"},
                                           {"fp8_w8a16:tensor"},
                                           {"fp8_w8a16:channel"},
                                           {"fp8_w8a16:block128"},
                                           {"mxfp8_w8a16"},
                                           {"w_mxfp6_e2m3"},
                                           {"w_mxfp6_e3m2"},
                                           {"q6_k"},
                                           {"iq4"},
                                           {"int8_w8a8:channel"},
                                           {"int8_w8a16:g128", true},
                                           {"int8_w8a16:g32", true},
                                           {"unquantized"},
                                           {"unquantized", false, DType::kF16}};
  for (const DecodeCase& format : formats) {
    DecodeCase c = format;
    add(c);                                             // plain
    c.tokens = 1, c.top_k = 4, add(c);                  // one token
    c.tokens = 37, c.top_k = 3, c.bias = true, add(c);  // two tiles
    c.hidden = 392, c.intermediate = 288, add(c);       // tails of K, rows and chunks
    c.activation.kind = ActivationKind::kGeluNoMul, c.output = DType::kBF16, add(c);  // ungated
    c = format, c.tokens = 64, c.experts = 5, c.top_k = 8, c.skew = true, c.map = true, add(c);
    c = format, c.batched = true, c.tokens = 11, c.experts = 7;
    c.output = format.scheme.find("mx") != std::string::npos ? DType::kBF16 : DType::kF16,
    add(c);  // MX outputs overflow F16
    c = format, c.hidden = 1040, c.experts = c.top_k = 8, c.tokens = 1,
    add(c);  // CTAs and warps with two lists
    c = format, c.by_route = true, c.tokens = 9, add(c);
    c = format, c.intermediate = 7168, c.tokens = 8, c.experts = 2, add(c);  // K split
    c.intermediate = 7168 + 704, add(c);                                     // uneven
  }
  for (int kind = 0; kind < 10; ++kind) {
    DecodeCase c{"nvfp4_w4a16"};
    c.activation.kind = static_cast<ActivationKind>(kind);
    c.activation.alpha = 1.702F, c.activation.beta = 1.0F, c.bias = true;
    add(c);
    c.activation.limit = 0.7F, add(c);
  }
  add({.scheme = "nvfp4_w4a16", .top_k = 1, .weight_on_input = true});
  add({.scheme = "mxfp4_w4a16", .hidden = 2880, .intermediate = 320, .tokens = 20});
  add({.scheme = "mxfp4_w4a16",
       .hidden = 320,
       .intermediate = 320,
       .experts = 512,
       .top_k = 32,
       .tokens = 16});
  add({.scheme = "nvfp4_w4a16", .experts = 300, .top_k = 1, .tokens = 512, .skew = true});
  add({.scheme = "unquantized", .hidden = 130, .intermediate = 67, .tokens = 3, .output = DType::kBF16});
  return cases;
}

}  // namespace fusedmoe::cuda
