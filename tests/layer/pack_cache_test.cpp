#include "layer/pack_cache.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/layer.hpp>

#include "support/files.hpp"
#include "support/layer_inputs.hpp"
#include "support/random_layer.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> FilesOf(const fs::path& directory) {
  return {fs::directory_iterator(directory), fs::directory_iterator()};
}

/// A folder of its own for each test.
class PackCache : public ::testing::Test {
 protected:
  std::string Path(const char* name) const { return directory_ / name; }

  const test::TemporaryDirectory directory_;
};

PreparedWeights SmallWeights() {
  PreparedWeights weights;
  weights.layout_key = "some layout";
  weights.recipe = {"pad(3 -> 4)", "panel(n16k64)"};
  weights.layout_error = 0.25;
  Tensor codes = *Tensor::Allocate(DType::kU8, Shape{3, 100});
  for (int64_t i = 0; i < 300; ++i) {
    codes.mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(i * 37);
  }
  Tensor scales = *Tensor::Allocate(DType::kF32, Shape{3, 2, 5});
  for (int64_t i = 0; i < 30; ++i) {
    scales.mutable_view().as<float>()[i] = static_cast<float>(i) / 7;
  }
  weights.tensors = {{"codes", codes}, {"scales", scales}};
  return weights;
}

void ExpectSame(const PreparedWeights& actual, const PreparedWeights& expected) {
  EXPECT_EQ(actual.layout_key, expected.layout_key);
  EXPECT_EQ(actual.recipe, expected.recipe);
  EXPECT_EQ(actual.layout_error, expected.layout_error);
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < expected.tensors.size(); ++i) {
    const TensorView& a = actual.tensors[i].tensor.view();
    const TensorView& e = expected.tensors[i].tensor.view();
    EXPECT_EQ(actual.tensors[i].name, expected.tensors[i].name);
    EXPECT_EQ(a.dtype(), e.dtype());
    ASSERT_EQ(a.shape(), e.shape());
    EXPECT_EQ(0, std::memcmp(a.data(), e.data(), static_cast<size_t>(e.total_bytes())));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0U);
  }
}

TEST_F(PackCache, GivesBackWhatWasWritten) {
  ASSERT_TRUE(WritePacked(Path("file"), "key", SmallWeights(), {}).ok());
  const auto read = ReadPacked(Path("file"), "key", {});
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ExpectSame(*read, SmallWeights());
  EXPECT_TRUE(read->from_file);
}

// Whether the bytes lie in a mapping of the file: what was read was copied once, unseen.
bool IsMappedFrom(const std::byte* data, const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (begin <= address && address < end) {
      return line.ends_with(path);
    }
  }
  return false;
}

TEST_F(PackCache, IsMappedAndNotCopied) {
  ASSERT_TRUE(WritePacked(Path("file"), "key", SmallWeights(), {}).ok());
  const auto read = ReadPacked(Path("file"), "key", {});
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  for (const PreparedWeights::Named& named : read->tensors) {
    EXPECT_TRUE(IsMappedFrom(named.tensor.view().data(), fs::canonical(Path("file")))) << named.name;
  }
}

TEST_F(PackCache, RefusesTheFileOfSomethingElse) {
  ASSERT_TRUE(WritePacked(Path("file"), "key", SmallWeights(), {}).ok());
  const auto read = ReadPacked(Path("file"), "other", {});
  ASSERT_FALSE(read.ok());
  EXPECT_NE(read.status().message().find("something else"), std::string::npos);
}

TEST_F(PackCache, NoticesEveryChangedByte) {
  ASSERT_TRUE(WritePacked(Path("file"), "key", SmallWeights(), {}).ok());
  const std::string bytes = test::ReadFile(Path("file"));
  int64_t refused = 0;
  for (size_t at = 0; at < bytes.size(); at += at % 4096 < 320 ? 1 : 61) {  // densely where something stands
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    test::WriteFile(Path("changed"), changed);
    const auto read = ReadPacked(Path("changed"), "key", {});
    if (read.ok()) {
      ExpectSame(*read, SmallWeights());  // a byte between the tensors
    } else {
      ++refused;
    }
  }
  EXPECT_GT(refused, 420);  // 300 codes, 120 bytes of scales, and the header
}

TEST_F(PackCache, RefusesEveryShorterFile) {
  ASSERT_TRUE(WritePacked(Path("file"), "key", SmallWeights(), {}).ok());
  const std::string bytes = test::ReadFile(Path("file"));
  const size_t needed = 2 * 4096 + 120;  // header, codes and the last byte of the scales
  for (size_t size = 0; size < needed; size += size < 300 ? 1 : 97) {
    test::WriteFile(Path("shorter"), bytes.substr(0, size));
    EXPECT_FALSE(ReadPacked(Path("shorter"), "key", {}).ok()) << size << " bytes";
  }
}

struct Made {
  MoeConfig config;
  testing_support::RandomLayer layer;
};

Made MakeLayer() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.hidden = 96;
  config.intermediate = 64;
  config.routing.top_k = 2;
  config.dtype = DType::kBF16;
  Made made{config, testing_support::MakeRandomLayer(config, "nvfp4_w4a16", 3)};
  made.config = made.layer.config;
  made.layer.source.identity = "the weights of this test";
  return made;
}

std::vector<uint16_t> RunLayer(const Made& made, const LayerOptions& options,
                               std::vector<std::string>* notes) {
  RouterWeights router;
  const auto layer = MoeLayer::Create(made.config, made.layer.source, router, options);
  EXPECT_TRUE(layer.ok()) << layer.status().ToString();
  *notes = (*layer)->selection().notes;
  const Workspace workspace = *(*layer)->CreateWorkspace();
  const Tensor hidden = testing_support::RandomRows(5, made.config.hidden, DType::kBF16, 4);
  const auto routing = testing_support::MakeRandomRouting(5, 2, 4, 5);
  std::vector<uint16_t> out(static_cast<size_t>(5 * made.config.hidden));
  MoeLayer::Inputs inputs = testing_support::InputsOf(hidden, routing);
  MoeLayer::Outputs outputs;
  outputs.output =
      MutableTensorView(reinterpret_cast<std::byte*>(out.data()), DType::kBF16, Shape{5, made.config.hidden});
  EXPECT_TRUE((*layer)->Forward(inputs, outputs, workspace).ok());
  return out;
}

bool Says(const std::vector<std::string>& notes, const char* words) {
  return notes.size() == 1 && notes[0].find(words) != std::string::npos;
}

TEST_F(PackCache, LayerIsTheSameFromTheFileAndADamagedOneIsMadeAgain) {
  const Made made = MakeLayer();
  LayerOptions options;
  options.max_tokens = 5;
  std::vector<std::string> notes;
  const std::vector<uint16_t> expected = RunLayer(made, options, &notes);
  EXPECT_TRUE(notes.empty());
  options.pack_cache = directory_ / "made/on demand";
  EXPECT_EQ(RunLayer(made, options, &notes), expected);
  EXPECT_TRUE(Says(notes, "wrote"));
  EXPECT_EQ(RunLayer(made, options, &notes), expected);
  EXPECT_TRUE(Says(notes, "mapped"));

  const std::vector<fs::path> files = FilesOf(options.pack_cache);
  ASSERT_EQ(files.size(), 1U);
  std::string bytes = test::ReadFile(files[0]);
  bytes[4096 + 70] = static_cast<char>(bytes[4096 + 70] ^ 1);
  test::WriteFile(files[0], bytes);
  EXPECT_EQ(RunLayer(made, options, &notes), expected);
  ASSERT_EQ(notes.size(), 2U);
  EXPECT_NE(notes[0].find("damaged"), std::string::npos) << notes[0];
  EXPECT_EQ(RunLayer(made, options, &notes), expected);
  EXPECT_TRUE(Says(notes, "mapped"));
}

TEST_F(PackCache, OtherWeightsSizesAndBackendsHaveOtherFiles) {
  Made made = MakeLayer();
  LayerOptions options;
  options.pack_cache = directory_.path().string();
  std::vector<std::string> notes;
  RunLayer(made, options, &notes);
  made.layer.source.identity += " changed";
  RunLayer(made, options, &notes);
  EXPECT_EQ(FilesOf(options.pack_cache).size(), 2U);
  options.backend = "MARLIN";
  RunLayer(made, options, &notes);
  EXPECT_EQ(FilesOf(options.pack_cache).size(), 3U);
  options.backend = "REFERENCE";
  RunLayer(made, options, &notes);
  EXPECT_TRUE(Says(notes, "canonical"));
  made.layer.source.identity.clear();
  RunLayer(made, options, &notes);
  EXPECT_TRUE(Says(notes, "identity"));
  EXPECT_EQ(FilesOf(options.pack_cache).size(), 3U);
}

TEST_F(PackCache, FolderThatCannotBeWrittenIsNoError) {
  const Made made = MakeLayer();
  test::WriteFile(Path("a file"), "");
  LayerOptions options;
  options.pack_cache = Path("a file");
  std::vector<std::string> notes;
  RunLayer(made, options, &notes);
  EXPECT_TRUE(Says(notes, "not kept"));
  // The reason is that of the folder, not that the file in it finds none.
  fs::create_symlink(Path("nowhere/at all"), Path("dangling"));
  options.pack_cache = Path("dangling");
  notes.clear();
  RunLayer(made, options, &notes);
  EXPECT_TRUE(Says(notes, "dangling: cannot make the folder: ")) << testing::PrintToString(notes);
}

// Their addresses are not the host's to read.
TEST_F(PackCache, WeightsOnACardAreNotKept) {
  Backend card;
  card.name = "CARD";
  card.device = "cuda";
  card.prepare = [](const MoeProblem&, const Machine&, const ExpertSource&,
                    const Executor&) -> Result<PreparedWeights> {
    PreparedWeights weights = SmallWeights();
    weights.tensors[0].tensor = Tensor::Borrow(TensorView(nullptr, DType::kU8, Shape{3, 100}), nullptr);
    return weights;
  };
  ExpertSource source;
  source.identity = "of a checkpoint";
  std::vector<std::string> notes;
  const auto weights = PrepareCached(card, {}, {}, {}, source, {}, Path("folder"), notes);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("on a card"), std::string::npos) << notes[0];
  EXPECT_FALSE(fs::exists(Path("folder")));
}

TEST_F(PackCache, IdentityOfACheckpointFollowsFilesLayerAndShare) {
  const fs::path copy = Path("checkpoint");
  fs::copy(fs::path(FMOE_GOLDEN_DIR) / "checkpoints" / "mixtral-modelopt-nvfp4", copy,
           fs::copy_options::recursive);
  const auto identity = [&](const std::vector<int64_t>& ids = {}) {
    const auto checkpoint = *Checkpoint::Open(copy.string());
    return checkpoint->Experts(checkpoint->moe_layers().front(), {}, ids)->identity;
  };
  const std::string first = identity();
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(identity(), first);
  EXPECT_NE(identity({0}), first);
  std::string config = test::ReadFile(copy / "config.json");
  test::WriteFile(copy / "config.json", config + "\n");
  EXPECT_NE(identity(), first);
  test::WriteFile(copy / "config.json", config);
  EXPECT_EQ(identity(), first);
  for (const auto& entry : fs::directory_iterator(copy)) {
    if (entry.path().extension() == ".safetensors") {
      fs::last_write_time(entry.path(), fs::last_write_time(entry.path()) + std::chrono::milliseconds(1));
    }
  }
  EXPECT_NE(identity(), first);
  const std::string second = identity();
  // Other weights of the same size and time of modification, as in images of containers, whose files all have
  // one time.
  for (const auto& entry : fs::directory_iterator(copy)) {
    if (entry.path().extension() == ".safetensors") {
      const auto time = fs::last_write_time(entry.path());
      std::string bytes = test::ReadFile(entry.path());
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      test::WriteFile(entry.path(), bytes);
      fs::last_write_time(entry.path(), time);
    }
  }
  EXPECT_NE(identity(), second);
}

}  // namespace
}  // namespace fusedmoe
