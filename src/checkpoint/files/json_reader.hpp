#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe::checkpoint {

/// A pull parser over JSON text that outlives it: the caller asks for what it expects next, nothing is built.
/// The first mistake ends the parse; afterwards every call returns false and `status` says where and why.
/// Depth is bounded. Accepts what Python's json module writes (NaN, Infinity, -Infinity as numbers).
///
/// Not nlohmann::json, with which the library writes: that builds a document of every header and index (those
/// of large models name some 10^5 tensors), refuses NaN, and lets the second of two equal keys win unseen.
class JsonReader {
 public:
  enum class Kind : uint8_t { kObject, kArray, kString, kNumber, kBool, kNull, kInvalid };

  explicit JsonReader(std::string_view text) : text_(text) {}

  Kind Peek();
  bool EnterObject();
  /// The next key of the current object; false at its end (which is consumed) or after a mistake.
  bool NextKey(std::string_view* key);
  bool EnterArray();
  /// True when another element follows; false at the end of the array (consumed) or after a mistake.
  bool NextElement();
  /// The string's characters, unescaped. The view stays valid as long as the reader.
  bool String(std::string_view* value);
  /// A number without fraction or exponent that fits in 64 bits.
  bool Integer(int64_t* value);
  /// Any number; `integer` is set when it is one.
  bool Number(double* value, std::optional<int64_t>* integer);
  bool Bool(bool* value);
  bool Null();
  bool Skip();
  /// True when nothing but white space follows.
  bool Finish();

  bool ok() const { return error_.ok(); }
  const Status& status() const { return error_; }
  size_t position() const { return position_; }
  /// Records that the text is no JSON at the current position.
  bool Fail(std::string message);
  /// The same of text that is valid JSON, and not what belongs there.
  bool Refuse(std::string message);

 private:
  void SkipSpace() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n' ||
                                        text_[position_] == '\r' || text_[position_] == '\t')) {
      ++position_;
    }
  }
  bool At(char c) const { return position_ < text_.size() && text_[position_] == c; }
  bool Expect(char c);
  bool Literal(std::string_view word);
  bool Word(double* value);
  bool Digits(std::string_view wanted);
  bool Spelling(bool* is_integer);
  bool Enter(char open);
  bool StringSlow(size_t begin, std::string_view* value);
  bool HexQuad(uint32_t* value);

  std::string_view text_;
  size_t position_ = 0;
  std::vector<char> open_;  // closing bracket of each open container
  bool first_ = false;      // no element of the current container was seen yet
  std::deque<std::string> unescaped_;
  Status error_;
};

}  // namespace fusedmoe::checkpoint
