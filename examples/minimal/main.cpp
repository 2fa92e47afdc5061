// minimal CHECKPOINT INPUT: one layer of experts of a checkpoint on the hidden states of a safetensors file.
#include <iostream>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/safetensors.hpp>

namespace {

using namespace fusedmoe;

Status Run(const std::string& directory, const std::string& input) {
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(directory));
  if (checkpoint->moe_layers().empty()) {
    return Status::BadInput("no layer has routed experts").WithFile(directory);
  }
  FMOE_ASSIGN_OR_RETURN(const auto pool, ThreadPool::Create(/*num_threads=*/0));  // one a core
  LayerOptions options;
  options.executor = pool->executor();  // without one, weights are prepared on one core
  FMOE_ASSIGN_OR_RETURN(const auto layer,
                        MoeLayer::Load(checkpoint, checkpoint->moe_layers().front(), options));
  std::cout << ToString(layer->plan());

  FMOE_ASSIGN_OR_RETURN(const SafetensorsFile file, ReadSafetensors(input));
  const Tensor* hidden = file.Find("hidden_states");
  if (hidden == nullptr) {
    return Status::BadInput("the file has no hidden_states").WithFile(input);
  }
  FMOE_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(DType::kF32, hidden->shape()));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer->CreateWorkspace());
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden->view();  // neither logits nor ids: the router of the checkpoint decides
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  FMOE_RETURN_IF_ERROR(layer->Forward(inputs, outputs, workspace, pool->executor()));

  std::cout << "output " << output.shape().ToString() << ", first value " << *output.view().as<float>()
            << "\n";
  return Status::Ok();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: minimal CHECKPOINT INPUT.safetensors\n";
    return 2;
  }
  const Status status = Run(argv[1], argv[2]);
  if (!status.ok()) {
    std::cerr << status.ToString() << "\n";
  }
  return status.ok() ? 0 : 1;
}
