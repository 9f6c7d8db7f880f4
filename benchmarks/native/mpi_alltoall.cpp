// All-to-all-v by MPI. The send and receive buffers are the caller's, as MPI defines the call.
#include <mpi.h>

#include <cstdlib>
#include <vector>

#include "measurement.h"

namespace {

class MpiPeer {
 public:
  MpiPeer(int rank, int ranks, std::size_t bytes)
      : bytes_(bytes), send_(ranks * bytes), receive_(ranks * bytes) {
    for (int other = 0; other < ranks; ++other) {
      // A rank's own block needs no transfer; no program here moves it.
      counts_.push_back(other == rank ? 0 : static_cast<int>(bytes));
      offsets_.push_back(static_cast<int>(other * bytes));
    }
  }

  std::byte* outgoing(int to) { return send_.data() + to * bytes_; }

  void exchange() {
    MPI_Alltoallv(send_.data(), counts_.data(), offsets_.data(), MPI_BYTE, receive_.data(),
                  counts_.data(), offsets_.data(), MPI_BYTE, MPI_COMM_WORLD);
  }

  const std::byte* view(int from) const { return receive_.data() + from * bytes_; }

  void release() {}

 private:
  std::size_t bytes_;
  std::vector<std::byte> send_;
  std::vector<std::byte> receive_;
  std::vector<int> counts_;
  std::vector<int> offsets_;
};

}  // namespace

int main(int argc, char** argv) {
  const bench::Options options = bench::parse_options(argc, argv);
  // Before MPI_Init, so that its buffers are placed by the pinned process.
  const char* launched_as = std::getenv("OMPI_COMM_WORLD_RANK");
  if (launched_as == nullptr) {
    std::fprintf(stderr, "start this program with Open MPI's mpirun\n");
    return 2;
  }
  const int rank = std::atoi(launched_as);
  bench::pin_to_core(rank);
  MPI_Init(&argc, &argv);
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks != options.ranks) MPI_Abort(MPI_COMM_WORLD, 2);
  bench::Shared* shared = nullptr;
  MPI_Win window;
  MPI_Aint size = rank == 0 ? sizeof(bench::Shared) : 0;
  MPI_Win_allocate_shared(size, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &shared, &window);
  int unit = 0;
  MPI_Win_shared_query(window, 0, &size, &unit, &shared);
  if (rank == 0) std::memset(static_cast<void*>(shared), 0, sizeof(bench::Shared));
  MPI_Barrier(MPI_COMM_WORLD);
  MpiPeer peer(rank, ranks, options.bytes);
  bench::Rank self{*shared, rank, ranks};
  bench::Measurement(peer, self, options).run();
  MPI_Win_free(&window);
  MPI_Finalize();
}
