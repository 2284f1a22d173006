// What the device's cores call of a link; a link is a handle that Python has made.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

// All return a number of bytes, or -1 once the link has ended; `why` says why it has.
struct sky_link_functions {
  int64_t (*send)(void* link, const void* data, uint64_t size, int at_once);
  int64_t (*receive)(void* link, void* into, uint64_t size, int milliseconds);
  int64_t (*await_bytes)(void* link, int milliseconds);
  // Bytes that go over several links in turn, `stripe` of them at a time; `done` bytes went before these. With an
  // owner, the links use the memory until they `release` it; else it is free when this returns.
  int64_t (*send_striped)(void* const* links, int count, const void* data, uint64_t size, uint64_t done,
                          uint64_t stripe, void* owner, void (*release)(void*));
  // Returns 1 when all are there, 0 if the time has passed; `progress` has how many came over each link. Without
  // memory, they are dropped. `reached`, if there is one, is told on this thread, now and then, how many of the first
  // are all there; it must not throw.
  int64_t (*receive_striped)(void* const* links, int count, void* into, uint64_t size, uint64_t done, uint64_t stripe,
                             uint64_t* progress, int milliseconds, void (*reached)(void* context, uint64_t bytes),
                             void* context);
  void (*end)(void* link, const char* why);
  void (*why)(void* link, char* into, size_t size);
};
}
