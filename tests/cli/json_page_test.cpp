#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"

namespace fusedmoe::test {
namespace {

/// The row of docs/cli.md, "JSON", that begins with "| `object` |" or "| object |".
std::string RowOf(const std::string& page, const std::string& object) {
  const size_t begin = page.find("\n| " + object + " |");
  return begin == std::string::npos ? std::string()
                                    : page.substr(begin + 1, page.find('\n', begin + 1) - begin);
}

void ExpectDocumented(const nlohmann::json& document, const std::vector<std::string>& objects) {
  static const std::string whole = ReadFile(std::string(FMOE_GOLDEN_DIR) + "/../../docs/cli.md");
  static const std::string page = whole.substr(std::min(whole.find("## JSON"), whole.size()));
  std::string rows;
  for (const std::string& object : objects) {
    const std::string row = RowOf(page, object);
    EXPECT_NE(row, "") << "docs/cli.md has no row " << object;
    rows += row;
  }
  ASSERT_TRUE(document.is_object()) << objects.front();
  for (const auto& [key, value] : document.items()) {
    EXPECT_TRUE(key == "schema_version" || rows.find("`" + key + "`") != std::string::npos ||
                rows.find("`" + key + "?`") != std::string::npos)
        << objects.front() << " has '" << key << "', which docs/cli.md does not name";
  }
}

nlohmann::json Answer(std::vector<std::string> arguments) {
  arguments.emplace_back("--json");
  const ProcessResult result = RunCommand(arguments);
  EXPECT_EQ(result.exit_code, 0) << arguments[0] << ": " << result.err;
  return result.Json();
}

TEST(JsonPage, EveryField_StandsInItsRow) {
  const SampleCheckpoint plain("qwen3_moe", "unquantized"), quantized("qwen3_moe", "nvfp4_w4a4");
  const TemporaryDirectory directory;
  const std::string stats = directory / "stats", prepared = directory / "prepared";
  const nlohmann::json run =
      Answer({"run", plain.path(), "--input", plain.input(), "--output", plain.output(), "--check"});
  ExpectDocumented(run, {"`run`"});
  ExpectDocumented(run.at("plan"), {"`plan`"});
  ExpectDocumented(Answer({"explain", plain.path(), "--why-not", "MARLIN", "--diff", "sm90"}),
                   {"`explain`", "`explain` also"});
  ExpectDocumented(Answer({"backends", "--schemes"}), {"`backends`"});
  ExpectDocumented(Answer({"inspect", plain.path()}), {"`inspect`"});
  ExpectDocumented(Answer({"lint", quantized.path()}), {"`lint`"});
  ExpectDocumented(Answer({"verify", quantized.path(), "--tokens", "2"}), {"`verify`"});
  ExpectDocumented(Answer({"calibrate", plain.path(), "--input", plain.input(), "--output", stats}),
                   {"`calibrate`"});
  ExpectDocumented(Answer({"quantize", plain.path(), "--scheme", "nvfp4_w4a4", "--act-stats", stats,
                           "--scale-search", "--output", directory / "quantized"}),
                   {"`quantize`"});
  ExpectDocumented(Answer({"convert", quantized.path(), "--to", "compressed-tensors", "--output",
                           directory / "converted"}),
                   {"`convert`"});
  ExpectDocumented(Answer({"prepare", quantized.path(), "--backend", "MARLIN", "--output", prepared}),
                   {"`prepare`"});
  ExpectDocumented(Answer({"verify", prepared, "--tokens", "2"}),
                   {"`verify`", "`verify` of a prepared file also"});
  ExpectDocumented(Answer({"simulate", "olmoe-1b-7b", "--ranks", "8", "--all2all", "pplx"}), {"`simulate`"});
  ExpectDocumented(Answer({"doctor", "--no-probe"}), {"`doctor`"});
  ExpectDocumented(Answer({"version"}), {"`version`"});
  ExpectDocumented(Answer({"tune", "--scheme", "int8_w8a8", "--seconds", "0"}), {"`tune`"});
  const nlohmann::json bench = Answer({"bench", "olmoe-1b-7b", "--scheme", "int8_w8a8", "--tokens", "1",
                                       "--experts", "8", "--layers", "1", "--seconds", "0"});
  ExpectDocumented(bench, {"`bench`"});
  ExpectDocumented(bench.at("results").at(0), {"one of `results`"});
}

}  // namespace
}  // namespace fusedmoe::test
