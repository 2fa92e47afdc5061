#include <fstream>
#include <sstream>

#include "oracle/described_tables.hpp"
#include "oracle/support.hpp"

namespace fusedmoe {
namespace {

std::string Page() {
  std::ifstream file(std::string(FMOE_GOLDEN_DIR) + "/../../docs/oracle.md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(OracleDocs, EveryNameThatCanBeTyped_IsOnThePage) {
  const std::string page = Page();
  ASSERT_FALSE(page.empty());
  const auto expect = [&page](std::string_view name) {
    EXPECT_NE(page.find(name), std::string::npos) << name << " is missing in docs/oracle.md";
  };
  for (const SwitchInfo& info : SwitchTable()) {
    expect(info.name);
  }
  for (const Platform& platform : DescribedPlatforms()) {
    expect("`" + platform.name + "`");
  }
  for (int family = 0; family <= static_cast<int>(SchemeFamily::kOcpMx); ++family) {
    for (const DescribedBackend& row : TableOf(static_cast<SchemeFamily>(family)).rows) {
      expect(row.name);
    }
  }
#define FMOE_REASON_ON_PAGE(id, code, what) \
  if (Reason::id != Reason::kNone) {        \
    expect("`" code "`");                   \
  }
  FMOE_REASON_TABLE(FMOE_REASON_ON_PAGE)
#undef FMOE_REASON_ON_PAGE
}

}  // namespace
}  // namespace fusedmoe
