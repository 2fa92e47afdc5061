#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

#include "platform/file.hpp"

namespace fusedmoe::checkpoint {

/// A value of the metadata that may matter here: numbers, booleans, short strings, short lists of numbers.
/// Long ones (vocabularies) are checked and passed over.
struct GgufValue {
  enum class Kind : uint8_t { kInteger, kFloat, kBool, kString, kOther };
  Kind kind = Kind::kOther;
  bool is_list = false;
  std::vector<double> numbers;  ///< one, or those of a list; booleans as 0 and 1
  std::string text;
};

struct GgufTensor {
  std::string name;
  /// Slowest first, as everywhere else here; the file has them the other way round.
  std::vector<int64_t> dims;
  uint32_t type = 0;
  int64_t begin = 0, end = 0;  ///< bytes of the file
};

struct GgufHeader {
  std::map<std::string, GgufValue, std::less<>> values;
  std::vector<GgufTensor> tensors;  ///< by position in the file

  const GgufValue* Find(std::string_view key) const;
  std::optional<int64_t> Integer(std::string_view key) const;
};

/// Reads and checks the header of an open file, without touching the data: magic, version 2 or 3, sizes and
/// counts that the file can hold, names that are neither empty nor double, known types, offsets that follow
/// one another. Errors name the file and, where there is one, the tensor.
Result<GgufHeader> ReadGgufHeader(const platform::InputFile& file);

/// True when the file begins with the magic of GGUF; false for anything else, unreadable files too.
bool IsGgufFile(const std::string& path);

}  // namespace fusedmoe::checkpoint
