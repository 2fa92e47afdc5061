#include <gtest/gtest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "bounds.hpp"
#include "experts/cpu/cpu_plan.hpp"

// Counts allocations of the whole program while `counting` is set.
namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
}  // namespace

__attribute__((noinline)) void* operator new(size_t size) {
  if (counting.load(std::memory_order_relaxed)) {
    ++allocations;
  }
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace fusedmoe::cpu_test {
namespace {

const char* const kSchemes[] = {"unquantized",        "nvfp4_w4a16",      "int4_w4a16:g32",
                                "fp8_w8a16:block128", "fp8_w8a8:channel", "mxfp8_w8a8"};

/// Levels without tiles, under which a token has its bits whatever its neighbours.
std::vector<std::string> VectorIsas() {
  std::vector<std::string> names = HostIsas();
  std::erase(names, "amx");
  return names;
}

class EveryVectorIsa : public testing::TestWithParam<std::string> {
 protected:
  Layer LayerOf(const LayerSpec& spec) const {
    Layer layer = MakeLayer(spec);
    layer.problem.isa = GetParam();
    return layer;
  }
};
INSTANTIATE_TEST_SUITE_P(Host, EveryVectorIsa, testing::ValuesIn(VectorIsas()),
                         [](const auto& each) { return each.param; });

TEST_P(EveryVectorIsa, AnyNumberOfThreads_GivesTheSameBits) {
  for (const char* scheme : kSchemes) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = LayerOf(spec);
    const Runner runner = MakeRunner(layer);
    for (const int64_t tokens : {1, 3, 40}) {
      const Batch batch = MakeBatch(spec, tokens, 5);
      const std::vector<float> serial = RunBatch(layer, runner, batch);
      for (const int threads : {1, 2, 3, 7}) {
        const auto pool = *ThreadPool::Create(threads);
        EXPECT_EQ(RunBatch(layer, runner, batch, pool->executor()), serial)
            << scheme << " tokens=" << tokens << " threads=" << threads;
      }
    }
  }
}

TEST_P(EveryVectorIsa, ATokenAmongOthers_HasTheBitsItHasAlone) {
  for (const char* scheme : kSchemes) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = LayerOf(spec);
    const Runner runner = MakeRunner(layer);
    const int64_t tokens = 37;
    const Batch batch = MakeBatch(spec, tokens, 11);
    const std::vector<float> together = RunBatch(layer, runner, batch);
    for (int64_t t = 0; t < tokens; ++t) {
      Batch one;
      one.tokens = 1;
      one.hidden = Tensor::Borrow(batch.hidden.view().Rows(t, 1), batch.hidden.owner());
      one.ids.assign(batch.ids.begin() + t * spec.top_k, batch.ids.begin() + (t + 1) * spec.top_k);
      one.weights.assign(batch.weights.begin() + t * spec.top_k,
                         batch.weights.begin() + (t + 1) * spec.top_k);
      const std::vector<float> alone = RunBatch(layer, runner, one);
      EXPECT_EQ(0, std::memcmp(alone.data(), together.data() + t * spec.hidden, alone.size() * sizeof(float)))
          << scheme << " token " << t;
    }
  }
}

TEST_P(EveryVectorIsa, MoreTokensThanAPiece_AreCutWithoutChangingBits) {
  for (const char* scheme : {"nvfp4_w4a16", "fp8_w8a8:channel"}) {
    LayerSpec spec = SpecOf(scheme);
    spec.max_tokens = 300;
    Layer layer = LayerOf(spec);
    const Runner whole = MakeRunner(layer);
    const Batch batch = MakeBatch(spec, 300, 3);
    const std::vector<float> expected = RunBatch(layer, whole, batch);
    layer.problem.config.max_tokens = 64;  // pieces of at most 64 tokens
    const Runner pieces = MakeRunner(layer);
    EXPECT_EQ(RunBatch(layer, pieces, batch), expected) << scheme;
  }
}

TEST(CpuExperts_Apply, AllocatesNothing) {
  for (const char* scheme : kSchemes) {
    const LayerSpec spec = SpecOf(scheme);
    const Layer layer = MakeLayer(spec);
    const Runner runner = MakeRunner(layer);
    const auto pool = *ThreadPool::Create(2);
    for (const int64_t tokens : {1, 33}) {
      const Batch batch = MakeBatch(spec, tokens, 7);
      ExpertsInput input;
      input.num_tokens = tokens;
      input.rows.values = batch.hidden.view();
      input.topk_ids = batch.ids.data();
      input.topk_weights = batch.weights.data();
      Tensor output = *Tensor::Allocate(DType::kBF16, Shape{tokens, spec.hidden});
      ASSERT_TRUE(
          runner.experts->Apply(input, output.mutable_view(), runner.workspace, pool->executor()).ok());
      allocations = 0;
      counting = true;
      const Status status =
          runner.experts->Apply(input, output.mutable_view(), runner.workspace, pool->executor());
      counting = false;
      EXPECT_TRUE(status.ok());
      EXPECT_EQ(allocations.load(), 0) << scheme << " tokens=" << tokens;
    }
  }
}

TEST(CpuExperts_NoTokens, IsFine) {
  const LayerSpec spec = SpecOf("nvfp4_w4a16");
  const Layer layer = MakeLayer(spec);
  EXPECT_TRUE(RunBatch(layer, MakeRunner(layer), MakeBatch(spec, 0, 1)).empty());
}

TEST(CpuExperts_SkippedIds, ContributeNothing) {
  const LayerSpec spec = SpecOf("int4_w4a16:g32");
  Layer layer = MakeLayer(spec);
  Batch batch = MakeBatch(spec, 9, 4);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    batch.ids[slot] =
        slot % 2 == 0 || slot < 3 ? -1 : batch.ids[slot];  // the first token has no expert at all
  }
  for (const std::string& isa : HostIsas()) {
    layer.problem.isa = isa;
    const std::vector<float> out = RunBatch(layer, MakeRunner(layer), batch);
    EXPECT_LE(RelativeL2(out, Definition(layer).Forward(batch)), BoundOf(spec, isa)) << isa;
    EXPECT_TRUE(std::all_of(out.begin(), out.begin() + spec.hidden, [](float x) { return x == 0.0F; }))
        << isa;
  }
}

TEST(CpuExperts_DuplicateIds, AreSummed) {
  LayerSpec spec = SpecOf("unquantized");
  spec.dtype = DType::kF32;
  const Layer layer = MakeLayer(spec);
  Batch batch = MakeBatch(spec, 5, 4);
  std::fill(batch.ids.begin(), batch.ids.end(), 2);  // every slot of every token, and five empty experts
  EXPECT_LE(RelativeL2(RunBatch(layer, MakeRunner(layer), batch), Definition(layer).Forward(batch)), 4e-6);
}

TEST(CpuExperts_ExpertMap, SendsIdsToLocalExperts) {
  const LayerSpec spec = SpecOf("unquantized");
  Layer layer = MakeLayer(spec);
  layer.problem.config.num_experts = 12;
  const Runner runner = MakeRunner(layer);
  const Batch local = MakeBatch(spec, 8, 4);
  Batch global = local;
  std::vector<int32_t> map(12, -1);
  for (int32_t e = 0; e < 6; ++e) {
    map[static_cast<size_t>(2 * e + 1)] = e;  // odd ids live here
  }
  for (int32_t& id : global.ids) {
    id = 2 * id + 1;
  }
  ExpertsInput input;
  input.num_tokens = 8;
  input.rows.values = global.hidden.view();
  input.topk_ids = global.ids.data();
  input.topk_weights = global.weights.data();
  input.expert_map = map.data();
  std::vector<float> out(static_cast<size_t>(8 * spec.hidden));
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32, Shape{8, spec.hidden});
  ASSERT_TRUE(runner.experts->Apply(input, view, runner.workspace, {}).ok());
  EXPECT_EQ(out, RunBatch(layer, runner, local));
  global.ids[5] = 12;
  input.topk_ids = global.ids.data();
  EXPECT_EQ(runner.experts->Apply(input, view, runner.workspace, {}).code(), StatusCode::kUsage);
}

TEST(CpuExperts_RouterWeightOnInput, IsNotAppliedAgain) {
  LayerSpec spec = SpecOf("unquantized");
  spec.top_k = 1;
  const Layer layer = MakeLayer(spec);
  const Runner runner = MakeRunner(layer);
  const Batch batch = MakeBatch(spec, 6, 4);
  ExpertsInput input;
  input.num_tokens = 6;
  input.rows.values = batch.hidden.view();
  input.topk_ids = batch.ids.data();
  input.topk_weights = batch.weights.data();
  input.router_weight_on_input = true;
  std::vector<float> out(static_cast<size_t>(6 * spec.hidden));
  const MutableTensorView view(reinterpret_cast<std::byte*>(out.data()), DType::kF32, Shape{6, spec.hidden});
  ASSERT_TRUE(runner.experts->Apply(input, view, runner.workspace, {}).ok());
  Batch unit = batch;
  std::fill(unit.weights.begin(), unit.weights.end(), 1.0F);
  EXPECT_EQ(out, RunBatch(layer, runner, unit));
}

TEST(CpuExperts_SixteenBitOutput, IsTheFp32SumRoundedOnce) {
  const LayerSpec spec = SpecOf("nvfp4_w4a16");
  const Layer layer = MakeLayer(spec);
  const Runner runner = MakeRunner(layer);
  const Batch batch = MakeBatch(spec, 5, 4);
  const std::vector<float> sums = RunBatch(layer, runner, batch);
  ExpertsInput input;
  input.num_tokens = 5;
  input.rows.values = batch.hidden.view();
  input.topk_ids = batch.ids.data();
  input.topk_weights = batch.weights.data();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Tensor output = *Tensor::Allocate(dtype, Shape{5, spec.hidden});
    ASSERT_TRUE(runner.experts->Apply(input, output.mutable_view(), runner.workspace, {}).ok());
    std::vector<uint16_t> expected(sums.size());
    EncodeRow(dtype, sums.data(), static_cast<int64_t>(sums.size()),
              reinterpret_cast<std::byte*>(expected.data()));
    EXPECT_EQ(0, std::memcmp(expected.data(), output.view().data(), expected.size() * 2));
  }
}

/// Bytes that end where an inaccessible page begins.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page_ - 1) / page_ * page_ + page_;
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + mapped_ - page_, page_, PROT_NONE);
  }
  ~Guarded() { munmap(memory_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  std::byte* data() const { return memory_ + mapped_ - page_ - bytes_; }

 private:
  size_t bytes_, page_, mapped_;
  std::byte* memory_;
};

TEST(CpuExperts_BuffersThatEndAtAGuardPage, AreNotOverrun) {
  for (const char* scheme : kSchemes) {
    LayerSpec spec = SpecOf(scheme);
    spec.hidden = scheme == std::string("unquantized") ? 77 : 160;
    for (const std::string& isa : HostIsas()) {
      Layer layer = MakeLayer(spec);
      layer.problem.isa = isa;
      Runner runner = MakeRunner(layer);
      // Weights at the end of a page too: every tensor moves.
      PreparedWeights moved;
      moved.layout_key = runner.weights->layout_key;
      for (const PreparedWeights::Named& named : runner.weights->tensors) {
        const auto bytes = static_cast<size_t>(named.tensor.view().total_bytes());
        auto copy = std::make_shared<Guarded>(bytes);
        std::memcpy(copy->data(), named.tensor.view().data(), bytes);
        moved.tensors.push_back(
            {named.name,
             Tensor::Borrow(TensorView(copy->data(), named.tensor.dtype(), named.tensor.shape()), copy)});
      }
      WorkspaceBook book;
      auto weights = std::make_shared<const PreparedWeights>(std::move(moved));
      runner.experts = *kCpuFusedBackend.create(layer.problem, MachineFor(isa), weights, book);
      for (const int64_t tokens : {1, 5, 16}) {
        const Batch batch = MakeBatch(spec, tokens, 2);
        const auto bytes = static_cast<size_t>(batch.hidden.view().total_bytes());
        const Guarded hidden(bytes), output(bytes);
        std::memcpy(hidden.data(), batch.hidden.view().data(), bytes);
        ExpertsInput input;
        input.num_tokens = tokens;
        input.rows.values = TensorView(hidden.data(), DType::kBF16, Shape{tokens, spec.hidden});
        input.topk_ids = batch.ids.data();
        input.topk_weights = batch.weights.data();
        const MutableTensorView view(output.data(), DType::kBF16, Shape{tokens, spec.hidden});
        EXPECT_TRUE(runner.experts->Apply(input, view, runner.workspace, {}).ok());
      }
    }
  }
}

class EveryIsaBehaves : public testing::TestWithParam<std::string> {};

TEST_P(EveryIsaBehaves, BatchedRows_EqualStandardOnesAndRespectTheCounts) {
  for (const char* scheme : kSchemes) {
    LayerSpec spec = SpecOf(scheme);
    spec.dtype = DType::kF32;
    spec.max_tokens = 8;
    Layer layer = MakeLayer(spec);
    const Definition definition(layer);
    layer.problem.isa = GetParam();
    layer.problem.config.activation_format = ActivationFormatKind::kBatchedExperts;
    const Runner runner = MakeRunner(layer);
    const std::vector<int32_t> counts = {0, 8, 3, 1, 0, 5};
    std::mt19937 random(3);
    Tensor hidden = RandomTensor(DType::kF32, Shape{6, 8, spec.hidden}, random, 1.0F);
    float* values = hidden.mutable_view().as<float>();
    Tensor output = *Tensor::Allocate(DType::kF32, Shape{6, 8, spec.hidden});
    float* out = output.mutable_view().as<float>();
    std::fill_n(out, output.shape().count(), -7.0F);
    for (int64_t e = 0; e < 6; ++e) {  // rows beyond the count would spoil everything
      std::fill(values + (e * 8 + counts[static_cast<size_t>(e)]) * spec.hidden,
                values + (e + 1) * 8 * spec.hidden, std::nanf(""));
    }
    ExpertsInput input;
    input.rows.values = hidden.view();
    input.expert_num_tokens = counts.data();
    ASSERT_TRUE(runner.experts->Apply(input, output.mutable_view(), runner.workspace, {}).ok());
    std::vector<float> actual;
    std::vector<double> expected;
    for (int64_t e = 0; e < 6; ++e) {
      for (int64_t row = 0; row < 8; ++row) {
        const float* at = out + (e * 8 + row) * spec.hidden;
        if (row >= counts[static_cast<size_t>(e)]) {
          EXPECT_TRUE(std::all_of(at, at + spec.hidden, [](float x) { return x == -7.0F; }));
          continue;
        }
        const float* in = values + (e * 8 + row) * spec.hidden;
        const std::vector<double> result = definition.ExpertRow(e, {in, in + spec.hidden});
        expected.insert(expected.end(), result.begin(), result.end());
        actual.insert(actual.end(), at, at + spec.hidden);
      }
    }
    EXPECT_LE(RelativeL2(actual, expected), BoundOf(spec, GetParam())) << scheme;
  }
}

INSTANTIATE_TEST_SUITE_P(Host, EveryIsaBehaves, testing::ValuesIn(HostIsas()),
                         [](const auto& isa) { return isa.param; });

TEST(CpuExperts_WeightsOfAnotherLayout, AreRefused) {
  const Layer nvfp4 = MakeLayer(SpecOf("nvfp4_w4a16"));
  const Layer plain = MakeLayer(SpecOf("unquantized"));
  const Runner runner = MakeRunner(plain);
  WorkspaceBook book;
  const auto created = kCpuFusedBackend.create(nvfp4.problem, HostMachine(), runner.weights, book);
  ASSERT_FALSE(created.ok());
  EXPECT_EQ(created.status().code(), StatusCode::kUnsupported);
}

TEST(CpuExperts_ScalesThatThePlanDoesNotHold, AreRefused) {
  LayerSpec spec{.scheme = "int4_w4a16:g32"};
  Layer layer = MakeLayer(spec);
  const Executor executor;
  EXPECT_TRUE(kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor).ok());
  spec.scale_dtype = DType::kF32;
  const Layer wide = MakeLayer(spec);
  layer.experts[3].down = wide.experts[3].down;
  const auto refused = kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().ToString().find("down has format n16k64(U4, F32 per 32); the plan was made for "
                                             "n16k64(U4, BF16 per 32)"),
            std::string::npos)
      << refused.status().ToString();
  layer.problem.weights_scale_dtype = DType::kF32;  // which holds both
  EXPECT_TRUE(kCpuFusedBackend.prepare(layer.problem, HostMachine(), layer.Source(), executor).ok());
}

TEST(Plan_OfADescribedMachine, FollowsItsNodesAndProcessor) {
  Layer layer = MakeLayer({.scheme = "nvfp4_w4a16"});
  Machine machine = HostMachine();
  machine.num_numa_nodes = 1;
  machine.cpu_name = "AMD EPYC 9755";
  const cpu::CpuPlan amd = cpu::MakeCpuPlan(layer.problem, machine);
  EXPECT_EQ(amd.weight_nodes, 1);
  EXPECT_FALSE(amd.next_into_l2);
  EXPECT_GT(amd.prefetch[0], 0);
  EXPECT_GT(amd.prefetch[1], amd.prefetch[0]);  // two tokens compute longer on 4-bit codes
  machine.num_numa_nodes = 4;
  machine.cpu_name = "INTEL(R) XEON(R)";
  const cpu::CpuPlan intel = cpu::MakeCpuPlan(layer.problem, machine);
  EXPECT_EQ(intel.weight_nodes, 4);
  EXPECT_TRUE(intel.next_into_l2);
  EXPECT_GT(intel.prefetch[0], 4096);           // beyond the page that the core prefetches by itself
  EXPECT_LT(intel.slab_tiles, amd.slab_tiles);  // fewer tiles pay for decoding once
  EXPECT_EQ(amd.batch_tiles, 8);
  EXPECT_EQ(intel.batch_tiles, 16);
  EXPECT_TRUE(intel.wide_slabs);
  EXPECT_FALSE(amd.wide_slabs);
  layer.problem.activation = ActivationMode::kA8;
  EXPECT_FALSE(cpu::MakeCpuPlan(layer.problem, machine).wide_slabs);  // scales take the ports that multiply
}

/// A system with one node refuses to spread pages over four, and weights are the same.
TEST(Weights_OfMoreNodesThanThereAre, AreTheSame) {
  const Layer layer = MakeLayer({.scheme = "nvfp4_w4a16"});
  Machine machine = HostMachine();
  const PreparedWeights here = *kCpuFusedBackend.prepare(layer.problem, machine, layer.Source(), {});
  machine.num_numa_nodes = 4;
  const PreparedWeights there = *kCpuFusedBackend.prepare(layer.problem, machine, layer.Source(), {});
  ASSERT_EQ(here.tensors.size(), there.tensors.size());
  for (size_t i = 0; i < here.tensors.size(); ++i) {
    const TensorView& a = here.tensors[i].tensor.view();
    EXPECT_EQ(0, std::memcmp(a.data(), there.tensors[i].tensor.view().data(),
                             static_cast<size_t>(a.total_bytes())));
  }
}

}  // namespace
}  // namespace fusedmoe::cpu_test
