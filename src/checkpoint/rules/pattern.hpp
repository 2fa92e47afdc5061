#pragma once

#include <bitset>
#include <cstdint>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe::checkpoint {

/// Regular expressions of quantization metadata ("re:.*mlp.gate$"), which come from files that nobody vouches
/// for: matching takes time in proportion to pattern times text, whatever they are, and no recursion.
/// Literals, ., classes, \d \w \s \b, ^ $, groups, alternatives, repetition (greedy or not: only whether it
/// matches is asked), look-ahead, and look-behind of characters. Back references and flags are kUnsupported,
/// mistakes kBadInput.
class Pattern {
 public:
  static Result<Pattern> Compile(std::string_view text);
  /// True when the pattern matches from the beginning of `text` on, not necessarily to its end (Python's
  /// re.match).
  bool MatchesPrefix(std::string_view text) const;

 private:
  friend class PatternCompiler;
  enum class Op : uint8_t { kClass, kSplit, kJump, kBegin, kEnd, kWordBoundary, kLook, kBehind, kMatch };
  struct Instruction {
    Op op = Op::kMatch;
    // Class index or targets; kLook: where its program starts, and where to go on; kBehind: index.
    int32_t x = 0, y = 0;
    bool negated = false;
  };

  void Connect();
  /// Whether the last characters of `text` are of these classes.
  bool EndsWith(std::string_view text, const std::vector<int32_t>& classes) const;
  /// Whether the step behind an instruction that takes no character may be made here.
  bool Holds(const Instruction& instruction, std::string_view text, size_t position,
             const std::vector<char>& matches) const;

  std::vector<Instruction> program_;
  std::vector<std::bitset<256>> classes_;
  // The alternatives of each look-behind: the classes of the characters that end at a position.
  std::vector<std::vector<std::vector<int32_t>>> behinds_;
  // The instructions that lead to each instruction without a character.
  std::vector<std::vector<int32_t>> sources_;
  // Instructions of each look-ahead, inner ones first; the rest last.
  std::vector<std::vector<int32_t>> nests_;
};

}  // namespace fusedmoe::checkpoint
