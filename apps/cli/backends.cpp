#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/quant.hpp>

#include "command.hpp"
#include "describe.hpp"
#include "options.hpp"

namespace fusedmoe::cli {
namespace {

struct BackendsFlags {
  bool schemes = false;
  bool markdown = false;
  std::string platform;
};

// The page in docs/ must not depend on the machine that writes it: the richest described CPU stands for all.
constexpr const char* kPagePlatform = "cpu-amx";

/// A layer that objects to nothing but what is asked about: sizes that every group and tile divides, SiLU, no
/// bias.
ExplainRequest Question(const Scheme& scheme, ActivationFormatKind format, const std::string& platform) {
  ExplainRequest request;
  request.problem = "support matrix";
  request.config.num_experts = request.config.num_local_experts = 16;
  request.config.hidden = 2048;
  request.config.intermediate = 1024;
  request.config.routing.top_k = 2;
  request.config.activation_format = format;
  request.scheme = scheme;
  request.platform = platform;
  request.activation_format = format;
  return request;
}

/// Only the machine or the build stands against it.
bool LacksOnlyTheCard(const Candidate& candidate) {
  return std::all_of(candidate.verdicts.begin(), candidate.verdicts.end(), [](const Verdict& verdict) {
    return verdict.reason == Reason::kDevice || verdict.reason == Reason::kNotBuilt;
  });
}

/// Each backend is asked for a layer on the device that it runs on. `any_card`: as if there were a card and
/// CUDA in this build.
Result<std::vector<Candidate>> Ask(const std::string& scheme_name, ActivationFormatKind format,
                                   const std::string& platform, bool any_card) {
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, ParseScheme(scheme_name));
  ExplainRequest request = Question(scheme, format, platform);
  FMOE_ASSIGN_OR_RETURN(Explanation explanation, Explain(request));
  request.device = "cuda";
  FMOE_ASSIGN_OR_RETURN(const Explanation on_card, Explain(request));
  std::vector<Candidate>& candidates = explanation.selection.candidates;
  for (size_t index = 0; index < candidates.size(); ++index) {
    const std::vector<Verdict>& verdicts = candidates[index].verdicts;
    if (!candidates[index].supported && !verdicts.empty() && verdicts.front().reason == Reason::kDevice &&
        verdicts.front().actual == "cuda" && index < on_card.selection.candidates.size()) {
      candidates[index] = on_card.selection.candidates[index];
      if (any_card && LacksOnlyTheCard(candidates[index])) {
        candidates[index].supported = true;
        candidates[index].verdicts.clear();
      }
    }
  }
  return candidates;
}

std::string MatrixPage(const std::vector<std::vector<std::string>>& rows) {
  std::string page = fmt::format(
      "# Schemes and backends\n\n"
      "Written by `fusedmoe backends --schemes --markdown` (`make tables`): what each backend answers when "
      "asked for a layer\n"
      "with SiLU, no bias and sizes that all groups divide, on the described platform `{}`. `both`: the "
      "Standard and the\n"
      "BatchedExperts format. `CUDA_FUSED`: with `--device cuda`, on a Hopper card. Other layers, and this "
      "machine: "
      "`fusedmoe explain`.\n\n",
      kPagePlatform);
  for (size_t row = 0; row < rows.size(); ++row) {
    page += fmt::format("| {} |\n", fmt::join(rows[row], " | "));
    if (row == 0) {
      for (size_t column = 0; column < rows[0].size(); ++column) {
        page += "|---";
      }
      page += "|\n";
    }
  }
  return page;
}

Status ListMatrix(const BackendsFlags& flags, Output& output) {
  Json matrix = Json::array();
  std::vector<std::vector<std::string>> rows;
  for (const std::string& name : SchemeNames()) {
    std::vector<std::string> row = {name};
    std::vector<std::string> head = {"scheme"};
    FMOE_ASSIGN_OR_RETURN(const std::vector<Candidate> standard,
                          Ask(name, ActivationFormatKind::kStandard, flags.platform, flags.markdown));
    FMOE_ASSIGN_OR_RETURN(const std::vector<Candidate> batched,
                          Ask(name, ActivationFormatKind::kBatchedExperts, flags.platform, flags.markdown));
    for (size_t index = 0; index < standard.size(); ++index) {
      const bool one = standard[index].supported;
      const bool other = index < batched.size() && batched[index].supported;
      head.push_back(standard[index].backend);
      row.emplace_back(one && other ? "both"
                       : one        ? ActivationFormatName(ActivationFormatKind::kStandard)
                       : other      ? ActivationFormatName(ActivationFormatKind::kBatchedExperts)
                                    : "-");
    }
    const auto add = [&matrix, &name](const std::vector<Candidate>& candidates, ActivationFormatKind format) {
      for (const Candidate& candidate : candidates) {
        Json cell = {{"scheme", name},
                     {"backend", candidate.backend},
                     {"activation_format", ActivationFormatName(format)},
                     {"supported", candidate.supported}};
        if (!candidate.supported && !candidate.verdicts.empty()) {
          cell["code"] = ReasonCode(candidate.verdicts.front().reason);
          cell["reason"] = candidate.verdicts.front().sentence;
        }
        matrix.push_back(cell);
      }
    };
    add(standard, ActivationFormatKind::kStandard);
    add(batched, ActivationFormatKind::kBatchedExperts);
    if (rows.empty()) {
      rows.push_back(head);
    }
    rows.push_back(row);
  }
  output.Document({{"platform", flags.platform}, {"matrix", matrix}});
  output.Text(flags.markdown ? MatrixPage(rows) : Table(rows));
  return Status::Ok();
}

/// The names, with "fp8_w8a8:*" for a scheme whose granularities are all among them.
std::vector<std::string> Folded(const std::vector<std::string>& names) {
  std::map<std::string, size_t> granularities;
  const auto scheme_of = [](const std::string& name) { return name.substr(0, name.find(':')); };
  for (const std::string& name : SchemeNames()) {
    ++granularities[scheme_of(name)];
  }
  std::vector<std::string> words;
  for (auto name = names.begin(); name != names.end();) {
    const auto end = std::find_if(
        name, names.end(), [&](const std::string& other) { return scheme_of(other) != scheme_of(*name); });
    const auto count = static_cast<size_t>(end - name);
    if (count > 1 && count == granularities[scheme_of(*name)]) {
      words.push_back(scheme_of(*name) + ":*");
    } else {
      words.insert(words.end(), name, end);
    }
    name = end;
  }
  return words;
}

/// In lines that fit a terminal beside the names of the backends.
std::vector<std::string> Lines(const std::vector<std::string>& words) {
  constexpr size_t kColumns = 90;
  std::vector<std::string> lines(1);
  for (size_t index = 0; index < words.size(); ++index) {
    const std::string word = words[index] + (index + 1 < words.size() ? "," : "");
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > kColumns) {
      lines.emplace_back();
    }
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

Status ListBackends(const BackendsFlags& flags, Output& output) {
  if (flags.schemes) {
    return ListMatrix(flags, output);
  }
  // A backend is listed with every scheme that it runs in one format or the other.
  std::vector<std::string> names;
  std::vector<std::vector<std::string>> schemes;
  std::vector<std::string> objections;
  for (const std::string& scheme : SchemeNames()) {
    for (const ActivationFormatKind format :
         {ActivationFormatKind::kStandard, ActivationFormatKind::kBatchedExperts}) {
      FMOE_ASSIGN_OR_RETURN(const std::vector<Candidate> candidates,
                            Ask(scheme, format, flags.platform, false));
      for (const Candidate& candidate : candidates) {
        auto found = std::find(names.begin(), names.end(), candidate.backend);
        if (found == names.end()) {
          names.push_back(candidate.backend);
          schemes.emplace_back();
          objections.emplace_back();
          found = names.end() - 1;
        }
        const auto index = static_cast<size_t>(found - names.begin());
        if (!candidate.supported) {
          if (objections[index].empty() && !candidate.verdicts.empty()) {
            objections[index] = candidate.verdicts.front().sentence;
          }
        } else if (schemes[index].empty() || schemes[index].back() != scheme) {
          schemes[index].push_back(scheme);
        }
      }
    }
  }
  Json list = Json::array();
  std::vector<std::vector<std::string>> rows = {{"backend", "schemes (:* all granularities)"}};
  for (size_t index = 0; index < names.size(); ++index) {
    Json json = {{"backend", names[index]}, {"schemes", schemes[index]}};
    if (schemes[index].empty()) {
      json["reason"] = objections[index];
    }
    list.push_back(json);
    if (schemes[index].empty()) {
      rows.push_back({names[index], "none: " + objections[index]});
      continue;
    }
    bool first = true;
    for (const std::string& line : Lines(Folded(schemes[index]))) {
      rows.push_back({first ? names[index] : "", line});
      first = false;
    }
  }
  output.Document({{"platform", flags.platform}, {"backends", list}});
  output.Text(Table(rows));
  return Status::Ok();
}

}  // namespace

Action DefineBackends(CLI::App& app) {
  auto flags = std::make_shared<BackendsFlags>();
  CLI::Option* schemes =
      app.add_flag("--schemes", flags->schemes, "The matrix of schemes, backends and activation formats");
  app.add_option("--platform", flags->platform, "host (the default), or a described platform");
  app.add_flag("--markdown", flags->markdown, "With --schemes: the page of docs/, for one described platform")
      ->needs(schemes)
      ->excludes(app.get_option("--json"));  // which has no pages
  return [flags](Output& output) {
    if (flags->platform.empty()) {
      flags->platform = flags->markdown ? kPagePlatform : "host";
    }
    return ListBackends(*flags, output);
  };
}

}  // namespace fusedmoe::cli
