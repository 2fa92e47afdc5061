#include "platform/cuda/graph.hpp"

#include <utility>

#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {

struct Graph::Impl {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;

  ~Impl() {
    if (executable != nullptr) {
      (void)cudaGraphExecDestroy(executable);
    }
    if (graph != nullptr) {
      (void)cudaGraphDestroy(graph);
    }
    for (const cudaEvent_t event : {begin, end}) {
      if (event != nullptr) {
        (void)cudaEventDestroy(event);
      }
    }
    if (stream != nullptr) {
      (void)cudaStreamDestroy(stream);
    }
  }
};

Graph::Graph() = default;
Graph::~Graph() = default;

Result<std::unique_ptr<Graph>> Graph::Capture(const std::function<Status(void* stream)>& body) {
  std::unique_ptr<Graph> graph(new Graph());
  graph->impl_ = std::make_unique<Impl>();
  Impl& impl = *graph->impl_;
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&impl.stream, cudaStreamNonBlocking), "creating a stream"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&impl.begin), "creating an event"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&impl.end), "creating an event"));
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaStreamBeginCapture(impl.stream, cudaStreamCaptureModeThreadLocal), "beginning a capture"));
  const Status ran = body(impl.stream);
  const Status ended = ToStatus(cudaStreamEndCapture(impl.stream, &impl.graph), "ending a capture");
  if (!ran.ok()) {
    (void)cudaGetLastError();
    return ran;
  }
  FMOE_RETURN_IF_ERROR(ended);
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaGraphInstantiate(&impl.executable, impl.graph, 0), "instantiating a graph"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGraphUpload(impl.executable, impl.stream), "uploading a graph"));
  return Result<std::unique_ptr<Graph>>(std::move(graph));
}

Result<double> Graph::Run() {
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(impl_->begin, impl_->stream), "timing a graph"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGraphLaunch(impl_->executable, impl_->stream), "launching a graph"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventRecord(impl_->end, impl_->stream), "timing a graph"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(impl_->end), "running a graph"));
  float milliseconds = 0;
  FMOE_RETURN_IF_ERROR(
      ToStatus(cudaEventElapsedTime(&milliseconds, impl_->begin, impl_->end), "timing a graph"));
  return static_cast<double>(milliseconds) / 1e3;
}

}  // namespace fusedmoe::cuda
