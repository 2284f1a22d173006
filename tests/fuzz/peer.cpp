// What the process of another device sends to a worker: its name, and tensors that were to come.
#include "../../src/skyward/device/csrc/worker/peers.h"

#include <ATen/ops/empty.h>

#include "ways.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (!size) return 0;
  auto& peers = sky::Peers::all();
  constexpr uint64_t link = 7;
  try {
    peers.add(link, fuzz::ways(data, size), false, nullptr, "");
  } catch (const sky::Disconnected&) {
    return 0;
  }
  std::vector<std::shared_ptr<sky::Passage>> passages;
  for (uint64_t bytes : {8, 100, 0, 2 << 20, 3}) {
    auto passage = std::make_shared<sky::Passage>(link, passages.size(), 4, bytes);
    // For the last one there is no place: what comes is dropped.
    if (bytes != 3)
      passage->memory = at::empty({static_cast<int64_t>(bytes) + 4}, at::TensorOptions().dtype(at::kByte)).storage();
    passages.push_back(passage);
    peers.expect(passage, c10::Device(c10::kCPU));
  }
  for (auto& passage : passages) passage->wait();
  peers.end_all();
  return 0;
}
