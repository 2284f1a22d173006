// Carriers: threads of Python's that send bytes over TLS straight from memory, or receive them straight into it. They
// are told where by addresses over sockets, and answer each with one byte when they need the memory no more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "../wire/socket.h"

namespace sky {

// Those of one link in one direction, to which the pieces of a passage go in turn.
class Carriers {
 public:
  static constexpr uint64_t kPiece = 256 << 10;

  explicit Carriers(const std::vector<int>& sockets) {
    for (int socket : sockets) sockets_.emplace_back(socket);
  }
  Carriers(const Carriers&) = delete;

  // A part of a passage, of which `done` bytes went before it. Returns, or throws, when no carrier uses the memory.
  void carry(const void* data, uint64_t size, uint64_t done) {
    std::vector<size_t> unanswered(sockets_.size());
    std::exception_ptr failure;
    try {
      for (uint64_t at = 0; at < size;) {
        auto place = done + at;
        auto which = place / kPiece % sockets_.size();
        Piece piece{reinterpret_cast<uintptr_t>(data) + at, std::min(size - at, kPiece - place % kPiece)};
        send_all(sockets_[which], &piece, sizeof piece);
        ++unanswered[which];
        at += piece.bytes;
      }
    } catch (const Disconnected&) {
      failure = std::current_exception();
    }
    for (size_t which = 0; which < sockets_.size(); ++which) try {
        for (char answer; unanswered[which]; --unanswered[which]) receive_all(sockets_[which], &answer, 1);
      } catch (const Disconnected&) {
        failure = std::current_exception();
      }
    if (failure) std::rethrow_exception(failure);
  }

  // The carriers end. They still answer: whoever waits in `carry` goes on when they do.
  void close() noexcept {
    std::lock_guard lock(mutex_);
    for (auto& socket : sockets_) ::shutdown(socket, SHUT_WR);
  }
  // For the thread that calls `carry`, after its last call.
  void release() noexcept {
    std::lock_guard lock(mutex_);
    sockets_.clear();
  }

 private:
  struct Piece {
    uint64_t address, bytes;
  };

  std::mutex mutex_;
  std::vector<OwnSocket> sockets_;
};

}  // namespace sky
