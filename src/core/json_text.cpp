#include "core/json_text.hpp"

namespace fusedmoe {

size_t Utf8Length(std::string_view text) {
  const auto byte = [text](size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) {
    return 0;
  }
  // The second byte excludes overlong forms, surrogates and codes beyond U+10FFFF.
  const unsigned char low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) {
    return 0;
  }
  for (size_t at = 2; at < length; ++at) {
    if (byte(at) < 0x80 || byte(at) > 0xBF) {
      return 0;
    }
  }
  return length;
}

void AppendJsonString(std::string_view text, std::string* out) {
  out->push_back('"');
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const char first = text.front();
    if (length == 0) {
      *out += "\\ufffd";
    } else if (first == '"' || first == '\\') {
      out->push_back('\\');
      out->push_back(first);
    } else if (static_cast<unsigned char>(first) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      *out += "\\u00";
      out->push_back(kDigits[static_cast<size_t>(first) / 16]);
      out->push_back(kDigits[static_cast<size_t>(first) % 16]);
    } else {
      *out += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out->push_back('"');
}

}  // namespace fusedmoe
