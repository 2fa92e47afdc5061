#include "checkpoint/rules/pattern.hpp"

#include <algorithm>
#include <utility>

#include "checkpoint/rules/pattern_characters.hpp"

namespace fusedmoe::checkpoint {
namespace {

bool IsWord(std::string_view text, size_t at) {
  return at < text.size() && WordCharacters().test(static_cast<unsigned char>(text[at]));
}

}  // namespace

void Pattern::Connect() {
  const auto size = static_cast<int32_t>(program_.size());
  sources_.assign(program_.size(), {});
  std::vector<std::pair<int32_t, int32_t>> looks;  // where the program of a look-ahead begins and ends
  for (int32_t at = 0; at < size; ++at) {
    const Instruction& instruction = program_[static_cast<size_t>(at)];
    const auto leads_to = [&](int32_t target) { sources_[static_cast<size_t>(target)].push_back(at); };
    switch (instruction.op) {
      case Op::kSplit:
        leads_to(instruction.x);
        leads_to(instruction.y);
        break;
      case Op::kJump:
        leads_to(instruction.x);
        break;
      case Op::kLook:
        looks.emplace_back(instruction.x, instruction.y);
        leads_to(instruction.y);
        break;
      case Op::kBegin:
      case Op::kEnd:
      case Op::kWordBoundary:
      case Op::kBehind:
        leads_to(at + 1);
        break;
      case Op::kClass:
      case Op::kMatch:
        break;
    }
  }
  // One inside another begins behind it: from the last to the first, the inner ones come first.
  std::vector<bool> placed(program_.size(), false);
  looks.insert(looks.begin(), {0, size});
  for (auto look = looks.rbegin(); look != looks.rend(); ++look) {
    std::vector<int32_t>& own = nests_.emplace_back();
    for (int32_t at = look->first; at < look->second; ++at) {
      if (!placed[static_cast<size_t>(at)]) {
        own.push_back(at);
      }
      placed[static_cast<size_t>(at)] = true;
    }
  }
}

bool Pattern::EndsWith(std::string_view text, const std::vector<int32_t>& classes) const {
  if (text.size() < classes.size()) {
    return false;
  }
  const std::string_view end = text.substr(text.size() - classes.size());
  for (size_t i = 0; i < classes.size(); ++i) {
    if (!classes_[static_cast<size_t>(classes[i])].test(static_cast<unsigned char>(end[i]))) {
      return false;
    }
  }
  return true;
}

bool Pattern::Holds(const Instruction& instruction, std::string_view text, size_t position,
                    const std::vector<char>& matches) const {
  switch (instruction.op) {
    case Op::kBegin:
      return position == 0;
    case Op::kEnd:
      return position == text.size();
    case Op::kWordBoundary:
      return ((position > 0 && IsWord(text, position - 1)) != IsWord(text, position)) != instruction.negated;
    case Op::kLook:
      return (matches[static_cast<size_t>(instruction.x)] != 0) != instruction.negated;
    case Op::kBehind: {
      const auto& ways = behinds_[static_cast<size_t>(instruction.x)];
      return std::any_of(ways.begin(), ways.end(), [&](const std::vector<int32_t>& classes) {
               return EndsWith(text.substr(0, position), classes);
             }) != instruction.negated;
    }
    default:
      return true;
  }
}

// From the end of the text to its beginning: which instructions lead to a match from this position on, known
// of the position behind it. Each pair is looked at once.
bool Pattern::MatchesPrefix(std::string_view text) const {
  std::vector<char> behind(program_.size(), 0), matches(program_.size(), 0);
  std::vector<int32_t> pending;
  for (size_t position = text.size() + 1; position-- > 0;) {
    std::fill(matches.begin(), matches.end(), 0);
    const auto found = [&](int32_t at) {
      if (std::exchange(matches[static_cast<size_t>(at)], 1) == 0) {
        pending.push_back(at);
      }
    };
    for (const std::vector<int32_t>& nest : nests_) {
      for (const int32_t at : nest) {
        const Instruction& instruction = program_[static_cast<size_t>(at)];
        const bool takes =
            instruction.op == Op::kClass && position < text.size() &&
            behind[static_cast<size_t>(at) + 1] != 0 &&
            classes_[static_cast<size_t>(instruction.x)].test(static_cast<unsigned char>(text[position]));
        if (takes || instruction.op == Op::kMatch) {
          found(at);
        }
      }
      while (!pending.empty()) {
        const int32_t at = pending.back();
        pending.pop_back();
        for (const int32_t source : sources_[static_cast<size_t>(at)]) {
          if (Holds(program_[static_cast<size_t>(source)], text, position, matches)) {
            found(source);
          }
        }
      }
    }
    std::swap(behind, matches);
  }
  return behind[0] != 0;
}

}  // namespace fusedmoe::checkpoint
