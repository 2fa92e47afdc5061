#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "cpu_layer.hpp"
#include "guarded.hpp"

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
// Without this one, memory of the library's own would come back to the delete below (std::stable_sort).
__attribute__((noinline)) void* operator new(size_t size, const std::nothrow_t&) noexcept {
  if (counting.load(std::memory_order_relaxed)) {
    ++allocations;
  }
  return std::malloc(size == 0 ? 1 : size);
}
__attribute__((noinline)) void operator delete(void* memory) noexcept {
  std::free(memory);
}
__attribute__((noinline)) void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace fusedmoe::cpu_test {
namespace {

TEST(CpuExperts_Apply, AllocatesNothing) {
  for (const char* scheme : kOneOfEachKernel) {
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

TEST(CpuExperts_BuffersThatEndAtAGuardPage, AreNotOverrun) {
  for (const char* scheme : kOneOfEachKernel) {
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

}  // namespace
}  // namespace fusedmoe::cpu_test
