// Records that are kept to be carried out again, on a GPU as CUDA graphs.
#pragma once

#include <c10/core/Storage.h>

#include <string>
#include <utility>
#include <vector>

namespace sky {

// Python's: recording what a GPU is given as a graph, and having it run. Each but `drop` returns 0 if it failed.
struct Captures {
  int (*begin)() = nullptr;
  uint64_t (*end)(int is_wanted) = nullptr;  // the number of the graph
  int (*run)(uint64_t graph) = nullptr;
  void (*drop)(uint64_t graph) = nullptr;
};
inline Captures captures;

// A number of a record that varies.
struct Varying {
  size_t at;
  size_t size;
};

// Where a slot lies, or lay when a graph was made.
using Lying = std::pair<uint32_t, c10::Storage>;

// The slots of records: those they use, fill and free.
struct Touched {
  std::vector<uint32_t> used, made, freed;
};

// Some records of a program, one after another. Those without numbers that vary can be a graph.
struct Part {
  size_t begin, end;
  bool may_be_graph;
  uint64_t graph = 0;
  // Of the graph: what it reads or writes to, which has to lie where it lay; what it leaves, which lies in its own
  // memory; and what is gone after it.
  std::vector<Lying> used = {};
  std::vector<Lying> left = {};
  std::vector<uint32_t> gone = {};
};

class Program {
 public:
  Program() = default;
  ~Program();
  Program(Program&&) = default;
  Program& operator=(Program&&) = default;

  void forget_graphs();

  std::string records;
  std::vector<Varying> varying;
  std::vector<Part> parts;    // none before there may be graphs
  std::vector<uint32_t> own;  // the slots that it fills, in order
  uint64_t runs = 0;          // as records, before there are graphs
  int divisions = 0;
  bool is_stale = false;  // what graphs were made for does not lie where it lay
};

}  // namespace sky
