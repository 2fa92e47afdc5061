#pragma once

#include <cstddef>
#include <string>
#include <string_view>

/// JSON as text, for those who write a little of it, or must not end where memory does: trees of JSON
/// allocate while they are taken down.
namespace fusedmoe {

/// Bytes of the character in UTF-8 that `text`, which is not empty, begins with; 0 where it is none.
size_t Utf8Length(std::string_view text);

/// Appends `text` in quotation marks, escaped. Bytes that are no UTF-8, which names of files may hold, become
/// U+FFFD.
void AppendJsonString(std::string_view text, std::string* out);

}  // namespace fusedmoe
