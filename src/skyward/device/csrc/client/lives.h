// The life of a slot: which storage it stands for, since a slot is used again after its storage is freed.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

namespace sky {

struct Life {
  uint64_t slot = 0;
  uint64_t birth = 0;  // how often the slot had another storage, or the storage another size
  uint64_t bytes = 0;
};

// Somebody besides the tensors looks at the slot: it is not free before both are done.
struct Hold {
  uint32_t count = 0;
  bool released = false;
};

// What becomes of the storages of a session whose worker is gone, in the session that takes its place.
struct Inheritance {
  std::unordered_map<uint32_t, Life> kept;         // get memory again
  std::unordered_map<uint32_t, std::string> lost;  // what to say of the others, by slot
  std::string otherwise;                           // and if there is nothing for a slot
};

}  // namespace sky
