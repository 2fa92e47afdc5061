#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// The command lines of this folder's programs: pairs of --name and value, lists with commas.
namespace fusedmoe::cuda {

inline std::vector<std::string> SplitList(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.emplace_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}
inline std::vector<int64_t> SplitCounts(std::string_view text) {
  std::vector<int64_t> counts;
  for (const std::string& part : SplitList(text)) {
    counts.push_back(std::atoll(part.c_str()));
  }
  return counts;
}
inline bool Wanted(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Where the values of options go. What is not named on the command line keeps its value.
class Options {
 public:
  Options& Take(const char* name, std::vector<std::string>& to) {
    return With(name, [&to](const std::string& value) { to = SplitList(value); });
  }
  Options& Take(const char* name, std::vector<int64_t>& to) {
    return With(name, [&to](const std::string& value) { to = SplitCounts(value); });
  }
  template <typename Number>
  Options& Take(const char* name, Number& to) {
    return With(name,
                [&to](const std::string& value) { to = static_cast<Number>(std::atof(value.c_str())); });
  }
  /// Exits with 2 where an option is unknown or lacks its value.
  void Parse(int argc, char** argv) const {
    for (int i = 1; i < argc; i += 2) {
      const auto found = setters_.find(argv[i]);
      if (found == setters_.end() || i + 1 == argc) {
        std::fprintf(stderr, "%s %s\n", found == setters_.end() ? "unknown option" : "no value behind",
                     argv[i]);
        std::exit(2);
      }
      found->second(argv[i + 1]);
    }
  }

 private:
  using Setter = std::function<void(const std::string&)>;
  Options& With(const char* name, Setter setter) {
    setters_.emplace(name, std::move(setter));
    return *this;
  }
  std::map<std::string_view, Setter> setters_;
};

}  // namespace fusedmoe::cuda
