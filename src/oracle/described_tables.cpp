#include "oracle/described_tables.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "core/text.hpp"
#include "oracle/family_tables.hpp"

namespace fusedmoe {
namespace {

/// Words of upstream's --moe-backend (and of the FP4 oracles) without a row in any table.
struct UndescribedWord {
  std::string_view word, what, instead;
};
constexpr UndescribedWord kUndescribedWords[] = {
    {"deep_gemm_mega_moe", "one DeepGEMM kernel for a whole expert-parallel layer of DeepSeek-V4 on sm100",
     "name deep_gemm"},
    {"humming", "Humming's mixed-precision kernels", "name marlin"},
    {"triton_unfused", "triton_kernels with the activation apart from the GEMMs", "name triton"},
    {"b12x", "FP4 kernels for sm120", "name flashinfer_cutlass"},
    {"flashinfer_b12x", "FlashInfer's FP4 kernels for sm120", "name flashinfer_cutlass"},
    {"hpc", "HPC's FP8 kernels for sm90", "name triton"},
    {"flydsl", "AMD's FlyDSL kernels", "name aiter"},
    {"sm70_skinny", "kernels of the fork 1Cat-vLLM for sm70", "name marlin"},
};

}  // namespace

DescribedTable TableOf(SchemeFamily family) {
  switch (family) {
    case SchemeFamily::kUnquantized:
      return UnquantizedTable();
    case SchemeFamily::kFp8:
      return Fp8Table();
    case SchemeFamily::kNvfp4:
      return Nvfp4Table();
    case SchemeFamily::kMxfp4:
      return Mxfp4Table();
    case SchemeFamily::kMxfp4GptOss:
      return Mxfp4GptOssTable();
    case SchemeFamily::kMxfp8:
      return Mxfp8Table();
    case SchemeFamily::kInt8:
      return Int8Table();
    case SchemeFamily::kWna16:
      return Wna16Table();
    case SchemeFamily::kW4a8:
      return W4a8Table();
    case SchemeFamily::kOcpMx:
      return OcpMxTable();
  }
  return {};
}

std::vector<std::string_view> AllBackendNames() {
  std::vector<std::string_view> names;
  const auto add = [&names](std::string_view name) {
    if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(name);
    }
  };
  for (const HostBackend& row : HostTable()) {
    add(row.name);
  }
  for (int family = 0; family <= static_cast<int>(SchemeFamily::kOcpMx); ++family) {
    for (const DescribedBackend& row : TableOf(static_cast<SchemeFamily>(family)).rows) {
      add(row.name);
    }
  }
  return names;
}

std::vector<std::string_view> AllBackendWords() {
  std::vector<std::string_view> words;
  for (int family = 0; family <= static_cast<int>(SchemeFamily::kOcpMx); ++family) {
    for (const DescribedBackend& row : TableOf(static_cast<SchemeFamily>(family)).rows) {
      if (std::find(words.begin(), words.end(), row.word) == words.end()) {
        words.push_back(row.word);
      }
    }
  }
  return words;
}

std::string WhyNotDescribed(std::string_view word) {
  const auto* found =
      std::find_if(std::begin(kUndescribedWords), std::end(kUndescribedWords),
                   [word](const UndescribedWord& known) { return UpperCase(known.word) == UpperCase(word); });
  return found == std::end(kUndescribedWords)
             ? std::string()
             : fmt::format("backend '{}' is known to vLLM ({}) and not described here: {}", found->word,
                           found->what, found->instead);
}

}  // namespace fusedmoe
