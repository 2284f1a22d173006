// Included first into the cores of a wheel: names of symbols that glibc 2.28 and its libstdc++ have, as torch's own
// wheels need. A newer system still has them; only its linker would choose newer ones.
#pragma once

#ifdef __linux__
#include <dlfcn.h>
#include <pthread.h>
#include <sys/single_threaded.h>

#include <ctime>
#include <new>
#include <sstream>

#ifdef __x86_64__
#define SKY_FIRST_GLIBC "GLIBC_2.2.5"
#else
#define SKY_FIRST_GLIBC "GLIBC_2.17"
#endif

#define SKY_OLDER(name, older) __asm__(".symver " name "," older)
SKY_OLDER("dladdr", "dladdr@" SKY_FIRST_GLIBC);
SKY_OLDER("dlerror", "dlerror@" SKY_FIRST_GLIBC);
SKY_OLDER("dlopen", "dlopen@" SKY_FIRST_GLIBC);
SKY_OLDER("dlsym", "dlsym@" SKY_FIRST_GLIBC);
SKY_OLDER("pthread_mutex_trylock", "pthread_mutex_trylock@" SKY_FIRST_GLIBC);
SKY_OLDER("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE",
          "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
// std::stringbuf::str, as C++17 called it.
SKY_OLDER("_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv",
          "_ZNKSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv@GLIBCXX_3.4.21");
// std::bad_alloc, where a newer library has a class derived from it.
SKY_OLDER("_ZSt28__throw_bad_array_new_lengthv", "_ZSt17__throw_bad_allocv@GLIBCXX_3.4");

#define SKY_OURS __attribute__((weak, visibility("hidden")))

// glibc has had this variable since 2.32: with our own, a reference count is always changed atomically.
extern "C" {
SKY_OURS char __libc_single_threaded = 0;
}

// glibc has had this function since 2.30. An older one waits as long by the clock that it knows.
SKY_OURS int sky_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) __asm__("pthread_cond_clockwait");
int sky_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  static auto* theirs = reinterpret_cast<decltype(&sky_clockwait)>(::dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (theirs) return theirs(condition, mutex, clock, until);
  timespec now, then;
  ::clock_gettime(clock, &now);
  ::clock_gettime(CLOCK_REALTIME, &then);
  constexpr long kSecond = 1'000'000'000;
  auto left = (until->tv_sec - now.tv_sec) * kSecond + until->tv_nsec - now.tv_nsec + then.tv_nsec;
  if (left < 0) left = 0;
  then.tv_sec += left / kSecond;
  then.tv_nsec = left % kSecond;
  return ::pthread_cond_timedwait(condition, mutex, &then);
}

// The constructor without arguments, which libstdc++ has had since GCC 9.
SKY_OURS void sky_make_ostringstream(std::ostringstream* self) __asm__(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void sky_make_ostringstream(std::ostringstream* self) { new (self) std::ostringstream(std::ios_base::out); }
#endif
