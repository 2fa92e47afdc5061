#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/described_tables.hpp"
#include "oracle/switches.hpp"

namespace fusedmoe {

/// A candidate that has been asked: its place in the table is its place in the list.
struct Asked {
  std::string_view name;
  std::string_view word;        ///< empty: none
  std::string_view batched_of;  ///< empty: none
  BackendChoice choice = BackendChoice::kAutomatic;
  bool built = true;
  std::vector<Verdict> objections;  ///< empty: it can run the problem
};

struct Choice {
  Selection selection;  ///< candidates and notes; `chosen` is left to the caller
  int index = -1;       ///< of the chosen one among the asked; -1: none
};

/// The rule of every selection. A name or a switch leaves some of the candidates; the first of those that can
/// run the problem is chosen. Every other candidate gets verdicts: first why it was not chosen (another was
/// named, a switch removed it, one before it can run), then everything that it cannot do. Errors: kUsage for
/// a name that no table holds.
Result<Choice> Choose(const std::vector<Asked>& asked, std::string_view named, ActivationFormatKind format,
                      const Overrides& overrides);

/// Says of every switch given whether it had an effect, by choosing again without it.
/// `again` returns the selection under other switches.
void ReportSwitches(const Switches& switches, SchemeFamily family, bool named,
                    const std::function<Selection(const Switches&)>& again, Selection& selection);

}  // namespace fusedmoe
