// What Linux adds to POSIX, and what stands in for it elsewhere and where SKYWARD_PORTABLE is set.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <pthread.h>
#endif

namespace sky {

#ifdef __linux__
constexpr int kNoSignal = MSG_NOSIGNAL;
constexpr int kCloseOnExec = MSG_CMSG_CLOEXEC;
#else
constexpr int kNoSignal = 0;  // Python ignores SIGPIPE
constexpr int kCloseOnExec = 0;
#endif

// Memory that two processes can share, as a descriptor; -1 where there is none. Without it bytes go through sockets.
inline int shareable_memory([[maybe_unused]] size_t size) {
#ifdef __linux__
  const char* portable = std::getenv("SKYWARD_PORTABLE");
  if (!portable || !*portable || std::strcmp(portable, "0") == 0) {
    int fd = static_cast<int>(::syscall(SYS_memfd_create, "skyward-device", 1u /* close on exec */));
    if (fd < 0 || !::ftruncate(fd, static_cast<off_t>(size))) return fd;
    ::close(fd);
    return -1;
  }
#endif
  errno = ENOSYS;
  return -1;
}

// How many bytes such memory has. Not by `fstat`, whose symbol is newer than the oldest glibc that wheels are for.
inline uint64_t size_of_memory(int fd) {
  auto end = ::lseek(fd, 0, SEEK_END);
  return end < 0 ? 0 : static_cast<uint64_t>(end);
}

// Returns when `word` has changed from `value` and someone called `wake_all`, or after so long.
inline void wait_for_change([[maybe_unused]] std::atomic<uint32_t>& word, [[maybe_unused]] uint32_t value,
                            [[maybe_unused]] const timespec& most) {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
  timespec moment{0, 50'000};
  ::nanosleep(&moment, nullptr);
#endif
}

inline void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#ifdef __linux__
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 2, nullptr, nullptr, 0);
#endif
}

// The number of this thread, as the system's tools show it.
inline uint32_t thread_number() {
#ifdef __linux__
  return static_cast<uint32_t>(::syscall(SYS_gettid));
#else
  uint64_t number = 0;
  ::pthread_threadid_np(nullptr, &number);
  return static_cast<uint32_t>(number);
#endif
}

}  // namespace sky
