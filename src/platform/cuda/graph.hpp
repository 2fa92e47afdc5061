#pragma once

#include <functional>
#include <memory>

#include <fusedmoe/status.hpp>

namespace fusedmoe::cuda {

/// Launches captured once and replayed as one: what an engine does with a decode step, and how kernels are
/// timed without the host between them. Not thread-safe.
class Graph {
 public:
  /// Runs `body` on a stream of its own, whose launches become the graph. What waits or allocates fails the
  /// capture.
  static Result<std::unique_ptr<Graph>> Capture(const std::function<Status(void* stream)>& body);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Replays once and waits: seconds between the first and the last kernel.
  Result<double> Run();

 private:
  Graph();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedmoe::cuda
