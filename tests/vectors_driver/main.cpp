// fusedmoe_vectors DIR: runs every golden case of a folder through the library.
// Prints "PASS topic/case" or "FAIL topic/case: first difference", last "N passed, N failed"; exits 1 on any
// failure.

#include <cstdio>

#include "support/golden.hpp"

int main(int argc, char** argv) {
  using namespace fusedmoe::golden;
  if (argc != 2) {
    std::fprintf(stderr, "usage: fusedmoe_vectors DIR\n");
    return 2;
  }
  const auto topics = TopicsIn(argv[1]);
  if (topics.empty()) {
    std::fprintf(stderr, "%s: no golden manifests (*.json) there\n", argv[1]);
    return 3;
  }
  int passed = 0, failed = 0;
  for (const std::string& topic : topics) {
    const auto cases = LoadTopic(argv[1], topic);
    if (!cases.ok()) {
      std::printf("FAIL %s: %s\n", topic.c_str(), cases.status().ToString().c_str());
      ++failed;
      continue;
    }
    for (const GoldenCase& golden_case : *cases) {
      std::fflush(stdout);  // what is known by now stays, whatever the next case does
      const Outcome outcome = RunCase(golden_case);
      if (outcome) {
        std::printf("FAIL %s/%s: %s\n", golden_case.topic().c_str(), golden_case.name().c_str(),
                    outcome->c_str());
        ++failed;
      } else {
        std::printf("PASS %s/%s\n", golden_case.topic().c_str(), golden_case.name().c_str());
        ++passed;
      }
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
