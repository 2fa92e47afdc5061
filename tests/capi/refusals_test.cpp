// What the C interface says is wrong with what it is given.
#include <fusedmoe/fusedmoe.h>

#include <cctype>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "capi/handles.hpp"
#include "capi/held_layer.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

const std::string kCheckpoint = FMOE_GOLDEN_DIR "/checkpoints/mixtral-modelopt-nvfp4";
constexpr int64_t kTokens = 5;

TEST(CApi, ExpertsThatDoNotFit_AreRefusedByName) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "nvfp4_w4a16", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const fmoe_layer_config config = ToC(random.config, "nvfp4_w4a16");
  fmoe_layer* layer = nullptr;
  held.refused = 2;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_BAD_INPUT);
  EXPECT_NE(LastText().find("load of expert 2 returned 7"), std::string::npos) << LastText();
  held.refused = -1;
  held.cut_short = 4;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_BAD_INPUT);
  EXPECT_NE(LastText().find("expert 4"), std::string::npos) << LastText();
  EXPECT_NE(LastText().find("up"), std::string::npos) << LastText();
  EXPECT_EQ(layer, nullptr);
  fmoe_layer_config wider = config;
  wider.hidden *= 2;
  held.cut_short = -1;
  EXPECT_EQ(fmoe_layer_create(&wider, &source, nullptr, &layer), FMOE_BAD_INPUT) << LastText();
}

// Codes that came without the name of their scheme would be taken for numbers; NumPy's floats are F64.
TEST(CApi, WeightsThatAreNoPlainFloats_AreNotUnquantized) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const fmoe_layer_config config = ToC(random.config, "unquantized");
  for (const DType dtype : {DType::kI8, DType::kU8, DType::kF64, DType::kF8E4M3}) {
    for (CanonicalExpert& expert : held.experts) {
      for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        matrix->codes = *Tensor::Allocate(dtype, matrix->codes.shape());
      }
    }
    fmoe_layer* layer = nullptr;
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_BAD_INPUT) << DTypeName(dtype);
    EXPECT_NE(LastText().find("codes are " + std::string(DTypeName(dtype)) + ", the scheme unquantized"),
              std::string::npos)
        << LastText();
    fmoe_layer_release(layer);
  }
}

TEST(CApi, NamesOfALayer_AreListedWhereOneIsUnknown) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  struct Wrong {
    const char* fmoe_layer_config::*field;
    const char* value;
    const char* says;
  };
  for (const Wrong& wrong :
       {Wrong{&fmoe_layer_config::activation, "tanh", "unknown activation 'tanh'; known: silu, gelu, "},
        Wrong{&fmoe_layer_config::routing, "Best", "unknown routing 'Best'; known: Default, Renorm"},
        Wrong{&fmoe_layer_config::score, "max", "unknown score 'max'; known: softmax, sigmoid, sqrt"}}) {
    fmoe_layer_config config = ToC(random.config, "unquantized");
    config.*wrong.field = wrong.value;
    fmoe_layer* layer = nullptr;
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_USAGE);
    EXPECT_EQ(std::string(fmoe_last_error()->message).rfind(wrong.says, 0), 0U) << LastText();
  }
  fmoe_layer_config config = ToC(random.config, "unquantized");
  config.activation = "SiLU", config.routing = "renormalizenaive", config.score = "SOFTMAX";
  Loaded loaded;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
}

bool HasWord(const std::string& text, const std::string& word) {
  const auto inside = [&](size_t at) {
    return at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    if (!inside(at - 1) && !inside(at + word.size())) {
      return true;
    }
  }
  return false;
}

// The header says them, since nobody asks a function for what it may be given.
TEST(CApi, Header_ListsEveryName) {
  std::ifstream file(FMOE_GOLDEN_DIR "/../../include/fusedmoe/fusedmoe.h");
  const std::string header((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (std::string names : {ActivationNames(), RoutingMethodNames(), ScoreFunctionNames()}) {
    names += ", ";
    for (size_t begin = 0, end = 0; (end = names.find(", ", begin)) != std::string::npos; begin = end + 2) {
      EXPECT_TRUE(HasWord(header, names.substr(begin, end - begin))) << names.substr(begin, end - begin);
    }
  }
}

TEST(CApi, OptionsOfCheckpoints_AreTaken) {
  fmoe_checkpoint_options options;
  fmoe_checkpoint_options_init(&options);
  fmoe_checkpoint* checkpoint = nullptr;
  options.io = "mmap";
  options.allow_partial = 1;
  EXPECT_EQ(fmoe_checkpoint_open_with(kCheckpoint.c_str(), &options, &checkpoint), FMOE_OK) << LastText();
  fmoe_checkpoint_release(checkpoint);
  options.io = "tape";
  EXPECT_EQ(fmoe_checkpoint_open_with(kCheckpoint.c_str(), &options, &checkpoint), FMOE_USAGE);
  EXPECT_STREQ(fmoe_last_error()->message, "unknown io 'tape'; known: auto, mmap, pread");
  options.io = nullptr;
  options.expert_layout = "sideways";
  EXPECT_NE(fmoe_checkpoint_open_with(kCheckpoint.c_str(), &options, &checkpoint), FMOE_OK);
  EXPECT_NE(LastText().find("sideways"), std::string::npos) << LastText();
}

TEST(CApi, WrongArguments_AreRefusedByName) {
  fmoe_checkpoint* checkpoint = reinterpret_cast<fmoe_checkpoint*>(16);
  EXPECT_EQ(fmoe_checkpoint_open("/no/such/folder", &checkpoint), FMOE_BAD_INPUT);
  EXPECT_EQ(checkpoint, nullptr);
  const fmoe_error* error = fmoe_last_error();
  EXPECT_EQ(error->code, FMOE_BAD_INPUT);
  EXPECT_NE(std::string(error->file).find("/no/such/folder"), std::string::npos) << error->text;
  EXPECT_EQ(fmoe_checkpoint_open(nullptr, &checkpoint), FMOE_USAGE);
  EXPECT_STREQ(fmoe_last_error()->message, "path is null");
  EXPECT_EQ(fmoe_checkpoint_open("x", nullptr), FMOE_USAGE);

  ASSERT_EQ(fmoe_checkpoint_open(kCheckpoint.c_str(), &checkpoint), FMOE_OK) << LastText();
  int64_t count = 0;
  const int64_t number = fmoe_checkpoint_moe_layers(checkpoint, &count)[0];
  fmoe_layer* layer = nullptr;
  fmoe_layer_options options;
  const auto refused = [&](const char* part) {
    EXPECT_EQ(fmoe_layer_load(checkpoint, number, &options, &layer), FMOE_USAGE);
    EXPECT_NE(LastText().find(part), std::string::npos) << LastText();
    fmoe_layer_options_init(&options);
  };
  fmoe_layer_options_init(&options);
  struct Wrong {
    const char* fmoe_layer_options::*field;
    const char* value;
    const char* part;
  };
  for (const Wrong& wrong :
       {Wrong{&fmoe_layer_options::determinism, "always", "unknown determinism 'always'"},
        Wrong{&fmoe_layer_options::activation, "a4", "unknown activation 'a4'"},
        Wrong{&fmoe_layer_options::device, "tpu", "unknown device 'tpu'; known: cpu, cuda"},
        Wrong{&fmoe_layer_options::isa, "sse9", "unknown isa 'sse9'; known: avx2, "},
        Wrong{&fmoe_layer_options::mode, "fast", "unknown mode 'fast'"},
        Wrong{&fmoe_layer_options::activation_format, "striped", "unknown activation_format 'striped'"},
        Wrong{&fmoe_layer_options::activation_rule, "vllm_nvfp5", "unknown activation rule 'vllm_nvfp5'"},
        Wrong{&fmoe_layer_options::all2all, "carrier_pigeon", "unknown all2all 'carrier_pigeon'"},
        Wrong{&fmoe_layer_options::backend, "FASTEST", "FASTEST"}}) {
    options.*wrong.field = wrong.value;
    refused(wrong.part);
  }
  options.tensor_parallel = 2;
  refused("tensor_parallel=2");
  options.tensor_parallel = options.data_parallel = int64_t{1} << 62;
  refused("data_parallel=4611686018427387904");
  // One rank is a deployment too.
  options.redundant_experts = -1;
  refused("num_redundant_experts is -1");
  options.redundant_experts = 4;
  refused("4 redundant experts need expert load balancing");
  options.load_balancing = 1;
  refused("expert parallelism is off");
  options.struct_size = sizeof(options) + 8;
  refused("struct_size");
  EXPECT_EQ(fmoe_layer_load(checkpoint, 99, &options, &layer), FMOE_USAGE);
  EXPECT_NE(LastText().find("99"), std::string::npos) << LastText();
  count = 7;
  EXPECT_EQ(fmoe_checkpoint_moe_layers(nullptr, &count), nullptr);
  EXPECT_EQ(count, 0);
  fmoe_checkpoint_release(checkpoint);
  fmoe_checkpoint_release(nullptr);
}

// Logits are written for every row of the router: one row too many would end behind the workspace.
TEST(CApi, RouterThatDoesNotFit_IsRefusedByName) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const int64_t experts = random.config.num_experts, hidden = random.config.hidden;
  const auto refused = [&](fmoe_tensor fmoe_layer_config::*field, const Shape& shape, DType dtype,
                           const char* name) {
    const Tensor tensor = *Tensor::Allocate(dtype, shape);
    fmoe_layer_config config = ToC(random.config, "unquantized");
    config.*field = ToC(tensor.view());
    config.routing = config.correction_bias.data == nullptr ? nullptr : "DeepSeekV3";
    fmoe_layer* layer = nullptr;
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_USAGE) << name;
    EXPECT_NE(LastText().find(name), std::string::npos) << LastText();
    fmoe_layer_release(layer);
  };
  refused(&fmoe_layer_config::router_weight, {experts + 1, hidden}, DType::kF32,
          "router weight has shape [7, 128]");
  refused(&fmoe_layer_config::router_weight, {experts, hidden / 2}, DType::kF32,
          "router weight has shape [6, 64]");
  refused(&fmoe_layer_config::router_weight, {experts, hidden}, DType::kI32, "router weight is I32");
  refused(&fmoe_layer_config::router_bias, {experts - 1}, DType::kF32, "router bias is F32 [5]");
  refused(&fmoe_layer_config::correction_bias, {experts}, DType::kI32, "correction bias is I32 [6]");
  refused(&fmoe_layer_config::token_id_to_experts, {10, 3}, DType::kI32,
          "a token-id table is given, which routing method Renormalize does not have");
}

TEST(CApi, RanksOnCardsThatCannotJoin_AreToldWhatIsMissing) {
  fmoe_communicator host{SingleCommunicator()};
  fmoe_communicator* cards = nullptr;
  EXPECT_EQ(fmoe_communicator_nccl(nullptr, nullptr, 1, -1, nullptr, &cards), FMOE_USAGE);
  EXPECT_STREQ(fmoe_last_error()->message, "host is null");
  EXPECT_EQ(fmoe_communicator_nccl(&host, "/no/such/libnccl.so", 1, -1, nullptr, &cards), FMOE_UNSUPPORTED);
  EXPECT_NE(LastText().find("/no/such/libnccl.so"), std::string::npos) << LastText();
  EXPECT_NE(LastText().find("2.18.0 or later"), std::string::npos) << LastText();
  EXPECT_EQ(cards, nullptr);
  EXPECT_EQ(fmoe_communicator_nccl(&host, nullptr, 0, -1, nullptr, &cards), FMOE_USAGE);
  EXPECT_NE(LastText().find("deadline_seconds=0 must be above 0"), std::string::npos) << LastText();
  EXPECT_EQ(fmoe_communicator_finish(&host, nullptr), FMOE_UNSUPPORTED);
  EXPECT_EQ(fmoe_communicator_finish(nullptr, nullptr), FMOE_USAGE);
}

TEST(CApi, ForwardOfTheWrongShape_IsRefusedWithBothShapes) {
  const HeldLayer layer("unquantized");
  const Loaded& loaded = layer.loaded;
  const Tensor hidden = RandomRows(kTokens, layer.config.hidden + 2, DType::kF32, 6);
  fmoe_forward forward{};
  forward.hidden = ToC(hidden.view());
  forward.output = forward.hidden;
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("[5, 130]"), std::string::npos) << LastText();
  forward.hidden.rank = 9;
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("hidden.rank is 9"), std::string::npos) << LastText();
  forward.hidden.rank = 2;
  forward.hidden.dtype = static_cast<fmoe_dtype>(77);
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("hidden.dtype is 77"), std::string::npos) << LastText();
  forward.hidden = {};
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("hidden is missing"), std::string::npos) << LastText();
}

// Empty tensors of many libraries have no address.
TEST(CApi, ForwardOfNoTokens_NeedsNoAddress) {
  const HeldLayer layer("unquantized");
  fmoe_forward forward{};
  forward.hidden.dtype = forward.output.dtype = FMOE_F32;
  forward.hidden.rank = forward.output.rank = 2;
  forward.hidden.shape[1] = forward.output.shape[1] = layer.config.hidden;
  EXPECT_EQ(fmoe_layer_forward(layer.loaded.layer, &forward, layer.loaded.workspace, nullptr), FMOE_OK)
      << LastText();
  forward.hidden.shape[0] = forward.output.shape[0] = 1;
  EXPECT_EQ(fmoe_layer_forward(layer.loaded.layer, &forward, layer.loaded.workspace, nullptr), FMOE_USAGE);
}

TEST(CApi, LastError_BelongsToItsThread) {
  fmoe_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(fmoe_checkpoint_open(nullptr, &checkpoint), FMOE_USAGE);
  std::thread([] {
    EXPECT_EQ(fmoe_last_error()->code, FMOE_OK);
    EXPECT_STREQ(fmoe_last_error()->text, "");
  }).join();
  EXPECT_EQ(fmoe_last_error()->code, FMOE_USAGE);
}

}  // namespace
}  // namespace fusedmoe
