#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/pattern_characters.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr size_t kMaxText = 1024;
constexpr size_t kMaxProgram = 20000;
constexpr int kMaxDepth = 40;
constexpr int kUnbounded = -1;

// The set behind a backslash, or nothing when it is an assertion or a plain character.
std::optional<std::bitset<256>> EscapedSet(char c) {
  const std::bitset<256> space = Range('\t', '\r') | Range(' ', ' ');
  switch (c) {
    case 'd':
      return Range('0', '9');
    case 'D':
      return ~Range('0', '9');
    case 'w':
      return WordCharacters();
    case 'W':
      return ~WordCharacters();
    case 's':
      return space;
    case 'S':
      return ~space;
    default:
      return std::nullopt;
  }
}

// Control characters that have a letter; nothing for other letters.
std::optional<char> ControlCharacter(char c) {
  constexpr std::string_view kLetters = "ntrfva", kCodes = "\n\t\r\f\v\a";
  const size_t at = kLetters.find(c);
  return at == std::string_view::npos ? std::nullopt : std::optional<char>(kCodes[at]);
}

bool IsWord(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

}  // namespace

// Parses and emits in one pass. Repetition copies the instructions of its operand, whose targets are relative
// until the end, so that a copy needs no repair.
class PatternCompiler {
 public:
  explicit PatternCompiler(std::string_view text) : text_(text) {}

  Result<Pattern> Compile() {
    Code code;
    if (text_.size() > kMaxText) {
      Fail(fmt::format("{} characters; at most {} are accepted", text_.size(), kMaxText));
    }
    if (ok()) {
      code = Alternatives(0);
    }
    if (ok() && at_ < text_.size()) {
      Fail("a ')' too many");
    }
    if (!ok()) {
      return status_;
    }
    code.push_back({Pattern::Op::kMatch});
    for (size_t i = 0; i < code.size(); ++i) {
      MakeAbsolute(code[i], static_cast<int32_t>(i));
    }
    pattern_.program_ = std::move(code);
    pattern_.Connect();
    return std::move(pattern_);
  }

 private:
  using Op = Pattern::Op;
  using Instruction = Pattern::Instruction;
  using Code = std::vector<Instruction>;  // targets relative to the instruction

  bool ok() const { return status_.ok(); }
  void Fail(std::string message, bool unsupported = false) {
    if (!ok()) {
      return;
    }
    message = fmt::format("the pattern '{}' is not understood at character {}: {}", text_.substr(0, 100), at_,
                          message);
    status_ = unsupported ? Status::Unsupported(std::move(message)) : Status::BadInput(std::move(message));
  }
  bool More() const { return ok() && at_ < text_.size(); }
  bool Take(char c) {
    if (!More() || text_[at_] != c) {
      return false;
    }
    ++at_;
    return true;
  }
  static void MakeAbsolute(Instruction& instruction, int32_t at) {
    if (instruction.op == Op::kSplit || instruction.op == Op::kJump || instruction.op == Op::kLook) {
      instruction.x += at;
      instruction.y += at;
    }
  }
  void Append(Code& code, const Code& more) {
    if (code.size() + more.size() > kMaxProgram) {
      return Fail("it unfolds to too many steps");
    }
    code.insert(code.end(), more.begin(), more.end());
  }
  Code Class(const std::bitset<256>& set) {
    pattern_.classes_.push_back(set);
    return {{Op::kClass, static_cast<int32_t>(pattern_.classes_.size() - 1)}};
  }

  Code Alternatives(int depth) {
    if (depth > kMaxDepth) {
      Fail("groups are nested too deeply");
    }
    Code left = Sequence(depth);
    while (Take('|')) {
      const Code right = Sequence(depth);
      Code both = {{Op::kSplit, 1, static_cast<int32_t>(left.size()) + 2}};
      Append(both, left);
      Append(both, {{Op::kJump, static_cast<int32_t>(right.size()) + 1}});
      Append(both, right);
      left = std::move(both);
    }
    return left;
  }

  Code Sequence(int depth) {
    Code code;
    while (More() && text_[at_] != '|' && text_[at_] != ')') {
      Append(code, Repeated(depth));
    }
    return code;
  }

  Code Repeated(int depth) {
    const Code operand = Atom(depth);
    int low = 1, high = 1;
    if (Take('*')) {
      low = 0, high = kUnbounded;
    } else if (Take('+')) {
      high = kUnbounded;
    } else if (Take('?')) {
      low = 0;
    } else if (More() && text_[at_] == '{' && !Counts(&low, &high)) {
      return operand;
    }
    if (low == 1 && high == 1) {
      return operand;
    }
    Take('?');  // lazy or greedy, the answer is the same
    if (More() && (text_[at_] == '*' || text_[at_] == '+')) {
      Fail("a repetition of a repetition");
    }
    Code code;
    for (int i = 0; i < low && ok(); ++i) {
      Append(code, operand);
    }
    const auto length = static_cast<int32_t>(operand.size());
    if (high == kUnbounded) {
      Append(code, {{Op::kSplit, 1, length + 2}});
      Append(code, operand);
      Append(code, {{Op::kJump, -length - 1}});
    }
    for (int i = low; i < high && ok(); ++i) {
      Append(code, {{Op::kSplit, 1, length + 1}});
      Append(code, operand);
    }
    return code;
  }

  // "{2}", "{2,}" or "{2,5}"; anything else is a literal brace, as in Python.
  bool Counts(int* low, int* high) {
    const size_t begin = at_++;
    const auto number = [&](int* value) {
      const size_t start = at_;
      for (*value = 0; More() && text_[at_] >= '0' && text_[at_] <= '9' && *value < 100000; ++at_) {
        *value = *value * 10 + (text_[at_] - '0');
      }
      return at_ > start;
    };
    int first = 0, second = 0;
    const bool has_first = number(&first);
    const bool comma = Take(',');
    const bool has_second = comma && number(&second);
    if (!Take('}') || (!has_first && !has_second)) {
      at_ = begin;
      return false;
    }
    *low = first;
    *high = !comma ? first : has_second ? second : kUnbounded;
    if (*high != kUnbounded && *high < *low) {
      Fail("counts that run backwards");
    }
    return true;
  }

  Code Atom(int depth) {
    const char c = text_[at_++];
    switch (c) {
      case '.':
        return Class(~Range('\n', '\n'));
      case '^':
        return {{Op::kBegin}};
      case '$':
        return {{Op::kEnd}};
      case '[':
        return Brackets();
      case '(':
        return Group(depth);
      case '*':
      case '+':
      case '?':
        Fail("nothing to repeat");
        return {};
      case '\\':
        return Escape();
      default:
        return Class(Range(static_cast<unsigned char>(c), static_cast<unsigned char>(c)));
    }
  }

  Code Escape() {
    if (!More()) {
      Fail("a backslash at the end");
      return {};
    }
    const char c = text_[at_++];
    if (const auto set = EscapedSet(c)) {
      return Class(*set);
    }
    if (c == 'b' || c == 'B') {
      return {{Op::kWordBoundary, 0, 0, c == 'B'}};
    }
    if (c == 'A') {
      return {{Op::kBegin}};
    }
    if (c == 'Z' || c == 'z') {
      return {{Op::kEnd}};
    }
    if (c >= '1' && c <= '9') {
      Fail("back references are not supported", true);
    }
    const auto code = static_cast<unsigned char>(Literal(c));
    return Class(Range(code, code));
  }

  // The character that `c` stands for behind a backslash. Letters that stand for none are refused, as in
  // Python: they might mean something there one day.
  char Literal(char c) {
    if (const auto control = ControlCharacter(c)) {
      return *control;
    }
    if (const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0; digits > 0) {
      return Hexadecimal(digits);
    }
    if (IsWord(c)) {
      --at_;
      Fail(fmt::format("the escape '\\{}' is not known", c), c == '0');
    }
    return c;
  }

  // "\x2e" and "\u002e". Names are compared byte by byte, so that characters of several bytes have no place.
  char Hexadecimal(size_t digits) {
    uint32_t code = 0;
    const std::string_view word = text_.substr(at_, digits);
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), code, 16);
    if (word.size() != digits || error != std::errc() || end != word.data() + word.size()) {
      Fail(fmt::format("{} hexadecimal digits are needed", digits));
      return 0;
    }
    if (code > 0x7f) {
      Fail(fmt::format("U+{:04X} is no character of ASCII; others are not supported in escapes", code), true);
      return 0;
    }
    at_ += digits;
    return static_cast<char>(code);
  }

  Code Group(int depth) {
    bool look = false, negated = false;
    if (Take('?')) {
      if (Take('=') || (negated = Take('!'))) {
        look = true;
      } else if (Take('<')) {
        return Behind(depth);
      } else if (Take('P')) {
        if (!Take('<')) {
          Fail("this kind of group is not supported", true);
        }
        while (More() && text_[at_] != '>') {
          ++at_;
        }
        Take('>');
      } else if (!Take(':')) {
        Fail("this kind of group is not supported", true);
      }
    }
    Code inner = Alternatives(depth + 1);
    if (!Take(')')) {
      Fail("a ')' is missing");
    }
    if (!look) {
      return inner;
    }
    Code code = {{Op::kLook, 1, static_cast<int32_t>(inner.size()) + 2, negated}};
    Append(code, inner);
    Append(code, {{Op::kMatch}});
    return code;
  }

  // "(?<=" or "(?<!" of alternatives of characters and classes, behind its '<'.
  Code Behind(int depth) {
    const bool negated = Take('!');
    if (!negated && !Take('=')) {
      Fail("this kind of group is not supported", true);
    }
    std::vector<std::vector<int32_t>> ways;
    do {
      std::vector<int32_t>& classes = ways.emplace_back();
      for (const Instruction& step : Sequence(depth + 1)) {
        if (step.op != Op::kClass) {
          Fail("look-behind of more than characters is not supported", true);
        }
        classes.push_back(step.x);
      }
    } while (Take('|'));
    if (!Take(')')) {
      Fail("a ')' is missing");
    }
    pattern_.behinds_.push_back(std::move(ways));
    return {{Op::kBehind, static_cast<int32_t>(pattern_.behinds_.size() - 1), 0, negated}};
  }

  Code Brackets() {
    const bool negated = Take('^');
    std::bitset<256> set;
    for (bool first = true;; first = false) {
      if (!More()) {
        Fail("a ']' is missing");
        return {};
      }
      char c = text_[at_++];
      if (c == ']' && !first) {
        break;
      }
      if (c == '\\' && More()) {
        c = text_[at_++];
        if (const auto escaped = EscapedSet(c)) {
          set |= *escaped;
          continue;
        }
        c = c == 'b' ? '\b' : Literal(c);
      }
      char last = c;
      if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
        last = text_[at_ + 1];
        at_ += 2;
        if (last == '\\' && More()) {
          last = text_[at_++];
          if (EscapedSet(last)) {
            Fail("a range that ends with a class");
          }
          last = ok() ? last == 'b' ? '\b' : Literal(last) : last;
        }
        if (static_cast<unsigned char>(last) < static_cast<unsigned char>(c)) {
          Fail("a range that runs backwards");
        }
      }
      if (ok()) {
        set |= Range(static_cast<unsigned char>(c), static_cast<unsigned char>(last));
      }
    }
    return Class(negated ? ~set : set);
  }

  std::string_view text_;
  size_t at_ = 0;
  Status status_;
  Pattern pattern_;
};

Result<Pattern> Pattern::Compile(std::string_view text) {
  return PatternCompiler(text).Compile();
}

}  // namespace fusedmoe::checkpoint
