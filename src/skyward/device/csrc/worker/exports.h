// Exports: a storage's memory as other processes of this node can open it.
#pragma once

#include <c10/core/Storage.h>

#include <string>

namespace sky {

// How to open the storage's memory; empty where it cannot be. On a CPU its bytes move to shareable memory the first
// time.
std::string exported(const c10::Storage& storage);

// Memory of the host that others can open from the start, so that opening it takes no copy; none if it is small, or
// there is no such memory.
c10::Storage shareable(uint64_t bytes);

// Whether such memory has pages that were never touched; the caller is about to write to them all.
bool begin_to_fill(const c10::Storage& storage);

// Such memory that was freed is kept for a while, to be used again: how much, and to free what is old, or all.
size_t idle_bytes();
void free_idle(bool all);

// The pointer as its allocator made it.
const c10::DataPtr& allocated(const c10::Storage& storage);

// Gives back GPU memory that was freed here while another process still used it, and is used no more.
void collect_exports();

}  // namespace sky
