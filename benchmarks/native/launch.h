// Starts one forked process per rank for the programs that have no launcher of their own.
#pragma once

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "measurement.h"

namespace bench {

// Zeroed memory that the processes forked later share.
inline void* shared_memory(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  return memory;
}

// Runs body(rank) in `ranks` pinned processes; returns the exit status for main.
inline int launch(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      pin_to_core(rank);
      body(rank);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    wait(&status);
    if (status == 0) continue;
    for (const pid_t child : children) kill(child, SIGKILL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }
  return 0;
}

}  // namespace bench
