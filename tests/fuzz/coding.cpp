// The coding of a device's records: any bytes are decoded or malformed, and what was encoded comes back.
#include "../../src/skyward/device/csrc/wire/coding.h"

#include <cstdlib>

namespace {

// Decodes in pieces of these sizes.
std::string decoded(std::string_view coded, size_t piece, size_t room) {
  sky::Decoder decoder;
  std::string all, into(room, '\0');
  for (size_t at = 0; at < coded.size(); at += piece) {
    auto part = coded.substr(at, piece);
    decoder.take(part.data(), part.size());
    while (auto n = decoder.give(into.data(), room)) {
      all.append(into, 0, n);
      // A few bytes may stand for a gigabyte.
      if (all.size() > 8 << 20) return all;
    }
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  size_t piece = 1 + data[0], room = 1 + 16 * size_t{data[1]};
  std::string_view given(reinterpret_cast<const char*>(data) + 2, size - 2);
  try {
    auto whole = decoded(given, given.size() + 1, room);
    if (whole.size() <= 8 << 20 && decoded(given, piece, 1 << 10) != whole) std::abort();
  } catch (const sky::Malformed&) {}
  // Twice, so that there is something to refer to.
  sky::Encoder encoder;
  std::string coded;
  encoder.encode(given, coded);
  encoder.encode(given, coded);
  if (decoded(coded, piece, room) != std::string(given) + std::string(given)) std::abort();
  return 0;
}
