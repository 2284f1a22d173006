// Links: copies between two devices, whose processes send the bytes to each other.
#pragma once

#include <string>
#include <string_view>

#include "session.h"

namespace sky {

// Python's: how the process of one device reaches that of another.
inline int (*introduce)(int from, int to, uint64_t link, char* text, uint64_t size) = nullptr;

// Neither has lazy bits; `from` may be of another dtype, and is broadcast.
void copy_between(const at::Tensor& to, const at::Tensor& from);

// A worker has lost these: their numbers, each 8 bytes. Called with a session's mutex held.
void note_lost_links(std::string_view numbers);

// A worker has told of a failure, which may be that of a copy: what is copied next comes from its source itself.
void note_failed_copies() noexcept;

// A session is closed: those it had links with are told.
void end_links(const Session& gone, const std::string& why) noexcept;

}  // namespace sky
