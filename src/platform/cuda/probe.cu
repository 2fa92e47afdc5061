// Ceilings of the card. The products run on m64n256k16 wgmma with both operands in shared memory, the fastest
// form that Hopper has; two warpgroups a block share the right-hand operand, as a GEMM's tile would.

#include "platform/cuda/probe.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kReadThreads = 512;
constexpr int kUnroll = 8;  // 16-byte loads in flight a thread

__global__ void __launch_bounds__(kReadThreads) ReadKernel(const uint4* data, int64_t count, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * kReadThreads * kUnroll;
  for (int64_t first = int64_t{blockIdx.x} * kReadThreads * kUnroll + threadIdx.x; first < count;
       first += stride) {
    uint4 value[kUnroll];
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      const int64_t index = first + int64_t{step} * kReadThreads;
      value[step] = index < count ? __ldcs(data + index) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int step = 0; step < kUnroll; ++step) {
      sum ^= value[step].x ^ value[step].y ^ value[step].z ^ value[step].w;
    }
  }
  if (sum == 0x9e3779b9U) {  // never, but the compiler cannot know: the loads stay
    *sink = sum;
  }
}

constexpr int kProductThreads = 256;
constexpr int kSlabBytes = 128;                  // 64 bf16 of K: one row of the 128-byte swizzle
constexpr int kLeftBytes = 2 * 64 * kSlabBytes;  // two warpgroups of 64 rows
constexpr int kRightBytes = 256 * kSlabBytes;
constexpr int kSharedBytes = kLeftBytes + kRightBytes + 1024;  // swizzled tiles start on 1024 bytes

/// Shared memory descriptor: address / 16, eight rows every 1024 bytes, 128-byte swizzle.
__device__ inline uint64_t Descriptor(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

/// Holds the accumulators in place: the compiler may neither touch them while products run nor move their use
/// before a wait.
__device__ inline void Pin(float (&sums)[128]) {
#pragma unroll
  for (int index = 0; index < 128; ++index) {
    asm volatile("" : "+f"(sums[index])::"memory");
  }
}

__global__ void __launch_bounds__(kProductThreads, 1) ProductKernel(int64_t steps, float* sink) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte memory[];
  const auto plain = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t base = (plain + 1023) & ~1023U;
  // bf16 values between 0.5 and 1 of either sign: operands that switch, since zeros would draw less power and
  // clock higher.
  auto* words = reinterpret_cast<uint32_t*>(memory + (base - plain));
  for (int index = static_cast<int>(threadIdx.x); index < (kLeftBytes + kRightBytes) / 4;
       index += kProductThreads) {
    const uint32_t mixed = static_cast<uint32_t>(index) * 2654435761U;
    words[index] = 0x3f003f00U | (mixed & 0x807f807fU);
  }
  __syncthreads();
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const uint64_t left = Descriptor(base + (threadIdx.x / 128) * (kLeftBytes / 2));
  const uint64_t right = Descriptor(base + kLeftBytes);
  float sums[128];
#pragma unroll
  for (int index = 0; index < 128; ++index) {
    sums[index] = 0.0F;
  }
#pragma unroll 1
  for (int64_t step = 0; step < steps; ++step) {
    Pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 64 of K; a descriptor counts 16 bytes
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
          "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
          "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
          "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
          "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
          "%128, %129, 1, 1, 1, 0, 0;\n"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
            "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
            "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),
            "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
            "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
            "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),
            "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),
            "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),
            "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]),
            "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
            "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]),
            "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),
            "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]),
            "+f"(sums[78]), "+f"(sums[79]), "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),
            "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]),
            "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),
            "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]), "+f"(sums[100]), "+f"(sums[101]),
            "+f"(sums[102]), "+f"(sums[103]), "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]),
            "+f"(sums[107]), "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
            "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]), "+f"(sums[116]),
            "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]), "+f"(sums[120]), "+f"(sums[121]),
            "+f"(sums[122]), "+f"(sums[123]), "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]),
            "+f"(sums[127])
          : "l"(left + 2 * part), "l"(right + 2 * part));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    Pin(sums);
  }
  float total = 0.0F;
#pragma unroll
  for (int index = 0; index < 128; ++index) {
    total += sums[index];
  }
  if (total == 0.12345F) {
    *sink = total;
  }
#endif
}

/// Two events; seconds between them.
class Timer {
 public:
  Status Create() {
    FMOE_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&begin_), "creating an event"));
    return ToStatus(cudaEventCreate(&end_), "creating an event");
  }
  ~Timer() {
    if (begin_ != nullptr) {
      (void)cudaEventDestroy(begin_);
    }
    if (end_ != nullptr) {
      (void)cudaEventDestroy(end_);
    }
  }
  void Begin() { (void)cudaEventRecord(begin_); }
  Result<double> End(const char* what) {
    (void)cudaEventRecord(end_);
    FMOE_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(end_), what));
    float milliseconds = 0;
    FMOE_RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&milliseconds, begin_, end_), what));
    return std::max(1e-9, static_cast<double>(milliseconds) / 1e3);
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

constexpr int kSamples = 8;

}  // namespace

Result<double> MeasureReadBandwidth() {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  FMOE_ASSIGN_OR_RETURN(const MemoryFigures figures, ReadMemory());
  const int64_t bytes = std::min<int64_t>(int64_t{2} << 30, figures.free_bytes / 4) & ~int64_t{4095};
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> buffer,
                        AllocateOnDevice(bytes, "the bandwidth probe"));
  FMOE_RETURN_IF_ERROR(FillZero(buffer.get(), bytes, nullptr));
  const unsigned blocks = static_cast<unsigned>(HostMachine().cuda->num_multiprocessors) * 8;
  Timer timer;
  FMOE_RETURN_IF_ERROR(timer.Create());
  double best = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    timer.Begin();
    ForgetErrors();
    ReadKernel<<<blocks, kReadThreads>>>(reinterpret_cast<const uint4*>(buffer.get()), bytes / 16,
                                         reinterpret_cast<uint32_t*>(buffer.get()));
    FMOE_RETURN_IF_ERROR(CheckLaunch("ReadKernel"));
    FMOE_ASSIGN_OR_RETURN(const double seconds, timer.End("measuring the read bandwidth"));
    best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  return best;
}

Result<double> MeasureBf16Peak() {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaFuncSetAttribute(ProductKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
               "preparing ProductKernel"));
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> sink, AllocateOnDevice(256, "the product probe"));
  const auto blocks = static_cast<unsigned>(HostMachine().cuda->num_multiprocessors);
  constexpr int64_t kSteps =
      20000;  // ten milliseconds: as long as a large layer, and the clocks have settled
  const double operations = 2.0 * 128 * 256 * 64 * kSteps * blocks;
  Timer timer;
  FMOE_RETURN_IF_ERROR(timer.Create());
  double best = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    timer.Begin();
    ForgetErrors();
    ProductKernel<<<blocks, kProductThreads, kSharedBytes>>>(kSteps, reinterpret_cast<float*>(sink.get()));
    FMOE_RETURN_IF_ERROR(CheckLaunch("ProductKernel"));
    FMOE_ASSIGN_OR_RETURN(const double seconds, timer.End("measuring the products"));
    best = std::max(best, operations / seconds);
  }
  return best;
}

Result<double> MeasureUploadBandwidth() {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  constexpr int64_t kBytes = int64_t{64} << 20;
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> buffer,
                        AllocateOnDevice(kBytes, "the upload probe"));
  void* pinned = nullptr;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&pinned, kBytes, 0), "allocating pinned memory"));
  const std::shared_ptr<void> owner(pinned, [](void* own) { (void)cudaFreeHost(own); });
  Timer timer;
  FMOE_RETURN_IF_ERROR(timer.Create());
  double best = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    timer.Begin();
    FMOE_RETURN_IF_ERROR(CopyToDevice(buffer.get(), pinned, kBytes, nullptr));
    FMOE_ASSIGN_OR_RETURN(const double seconds, timer.End("measuring the upload"));
    best = std::max(best, kBytes / seconds);
  }
  return best;
}

}  // namespace fusedmoe::cuda
