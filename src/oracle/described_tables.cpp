#include "oracle/described_tables.hpp"

#include <algorithm>

#include "oracle/family_tables.hpp"

namespace fusedmoe {

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

}  // namespace fusedmoe
