/*
 * How ranks end when one of them fails: poison, death and close in csrc/channel/channel*.cpp
 * and csrc/transport/shm/shm_transport.cpp. docs/design/model.md says which transition stands for which
 * line of C++, what is left out, and why that is sound.
 *
 *   RANKS       world size
 *   BOUND       k; there are 2(k + 1) slots, so that a post never waits (channel.pml)
 *   ITERATIONS  after which a rank closes
 *   WATCHED     the receiver of rank 0's messages that are larger than a slot; all others fit
 *   FAULTS      how many things may go wrong: see the end of `Rank`
 *   ALL_PEERS   1: a rank looks whether any peer is gone; 0: only whether the one it waits for is
 *   RECHECK     0: a rank that finds a peer gone does not look again for its message
 *   PASS_ON     0: a rank that finds itself poisoned keeps that to itself
 */

/* Messages of `from` that have arrived at `to`; the peers are served in the order from + 1, ... */
#define SENT(from, to) \
  (posted[from] + (served[from] > ((to) + RANKS - (from) - 1) % RANKS -> 1 : 0))
#define HAS_ARRIVED (SENT(peer, me) > completed[me])
#define IS_GONE(rank) (closed[rank] || dead[rank])
#define MISSES(rank) \
  ((rank) != me && IS_GONE(rank) && (SENT(rank, me) <= completed[me] || !RECHECK))
#define NEXT ((me + 1) % RANKS)
#define PREVIOUS ((me + RANKS - 1) % RANKS)

byte posted[RANKS];
byte completed[RANKS];
byte released[RANKS];
byte served[RANKS];

byte poison[RANKS]; /* ControlBlock::poisoned: the rank that failed + 1 */
bool asked[RANKS];  /* CallGate::shut */
bool closed[RANKS]; /* ControlBlock::closed */
bool dead[RANKS];
bool freed;         /* rank 0's memory for large messages is no more */

byte faults;          /* how many have happened */
bool at_fault[RANKS]; /* to this rank */
bool stopped;         /* one of them was a stop: others have only their deadline to notice it */

mtype = { idle, sending, looking, checking, examining, gone, poisoning, raised, closing, leaving,
          ended };
mtype = { PoisonedError, PeerGoneError, PeerTimeoutError, ChannelClosedError, UserError };

/* This rank is the first to notice: it tells all ranks, and then raises the error. */
inline fail(error) {
  printf("rank %d fails: %e\n", me, error);
  assert(faults > 0);
  phase = poisoning;
  source = me + 1;
  peer = 0
}

inline raise_poison() {
  printf("rank %d raises PoisonedError: rank %d failed\n", me, poison[me] - 1);
  assert(faults > 0);
  phase = (PASS_ON -> poisoning : raised);
  source = poison[me];
  peer = 0
}

/* `culprit` has closed or died; the error names it. */
inline fail_gone(culprit) {
  if
  :: !at_fault[culprit] ->
    printf("rank %d fails and blames rank %d, which has done nothing wrong\n", me, culprit);
    assert(false)
  :: else
  fi;
  fail(PeerGoneError)
}

proctype Rank(byte me) {
  mtype phase = idle;
  byte peer = me; /* the one served, awaited, missed or told */
  byte source;    /* of the poison that is being spread, + 1 */
  do
  /* post */
  :: d_step {
      phase == idle && !asked[me] && posted[me] < ITERATIONS &&
          posted[me] - released[me] <= BOUND ->
      if
      :: poison[me] != 0 -> raise_poison()
      :: else -> phase = sending; peer = NEXT
      fi
    }
  :: d_step {
      phase == sending ->
      printf("rank %d puts %d to %d\n", me, posted[me], peer);
      served[me]++;
      peer = (peer + 1) % RANKS;
      if
      :: peer == me -> served[me] = 0; posted[me]++; phase = idle
      :: else
      fi
    }

  /* wait */
  :: d_step {
      phase == idle && !asked[me] && completed[me] < posted[me] -> phase = looking; peer = PREVIOUS
    }
  :: d_step {
      phase == looking ->
      if
      :: HAS_ARRIVED && me == WATCHED && peer == 0 && freed ->
        assert(IS_GONE(0)); /* else the message would look damaged */
        phase = gone
      :: HAS_ARRIVED && !(me == WATCHED && peer == 0 && freed) ->
        peer = (peer + RANKS - 1) % RANKS;
        if
        :: peer == me ->
          printf("rank %d completes %d\n", me, completed[me]);
          completed[me]++;
          phase = idle
        :: else
        fi
      :: else -> phase = checking
      fi
    }
  :: d_step {
      phase == checking ->
      if
      :: asked[me] ->
        printf("rank %d raises ChannelClosedError\n", me);
        phase = raised
      :: !asked[me] && poison[me] != 0 -> raise_poison()
      :: else -> phase = examining
      fi
    }
  :: d_step { phase == examining && (HAS_ARRIVED || asked[me] || poison[me] != 0) -> phase = looking }
  :: d_step { phase == examining && MISSES(peer) -> phase = gone }
  :: d_step { phase == examining && ALL_PEERS && MISSES(NEXT) -> phase = gone; peer = NEXT }
  :: d_step {
      phase == examining && ALL_PEERS && MISSES(PREVIOUS) -> phase = gone; peer = PREVIOUS
    }
  :: d_step {
      phase == gone ->
      if
      :: poison[me] != 0 -> raise_poison()
      :: else -> fail_gone(peer)
      fi
    }
  :: atomic {
      phase == examining && timeout ->
      if
      :: !stopped ->
        printf("rank %d has only its deadline\n", me);
        assert(false)
      :: else
      fi;
      fail(PeerTimeoutError)
    }

  /* release */
  :: d_step { phase == idle && !asked[me] && released[me] < completed[me] -> released[me]++ }

  /* poison_all and pass_poison_on */
  :: d_step {
      phase == poisoning ->
      poison[peer] = (poison[peer] == 0 -> source : poison[peer]);
      peer++;
      if
      :: peer == RANKS -> phase = (closed[me] -> leaving : raised); peer = me; source = 0
      :: else
      fi
    }

  /* close, by the user: at the end, or after an error */
  :: d_step {
      phase == idle && released[me] == ITERATIONS && !asked[me] || phase == raised ->
      asked[me] = true;
      phase = idle
    }
  /* or never: it keeps the channel and does not touch it again */
  :: d_step { phase == raised && !asked[me] -> phase = ended }
  :: d_step {
      phase == idle && asked[me] ->
      printf("rank %d closes\n", me);
      closed[me] = true;
      phase = closing
    }
  :: d_step {
      phase == closing && PASS_ON && poison[me] != 0 ->
      phase = poisoning;
      source = poison[me];
      peer = 0
    }
  :: d_step {
      phase == closing && (!PASS_ON || poison[me] == 0) &&
          (me != 0 || released[WATCHED] == posted[0] || poison[0] != 0 || IS_GONE(WATCHED)) ->
      phase = leaving
    }
  :: atomic { phase == closing && timeout -> assert(stopped); phase = leaving }
  :: d_step { phase == leaving -> freed = freed || me == 0; phase = ended }

  /* faults: it dies, it stops, its user poisons the channel, another thread closes it */
  :: d_step {
      faults < FAULTS && phase != ended ->
      printf("rank %d dies\n", me);
      faults++;
      at_fault[me] = true;
      dead[me] = true;
      freed = freed || me == 0;
      phase = ended
    }
  :: d_step {
      faults < FAULTS && phase != ended ->
      printf("rank %d stops\n", me);
      faults++;
      stopped = true;
      phase = ended
    }
  :: d_step {
      faults < FAULTS && phase == idle && !asked[me] ->
      faults++;
      fail(UserError)
    }
  :: d_step {
      faults < FAULTS && phase != ended && !asked[me] ->
      printf("rank %d is closed by another thread\n", me);
      faults++;
      at_fault[me] = true;
      asked[me] = true
    }

  :: phase == ended -> break
  od
}

init {
  byte i;
  atomic {
    for (i : 0 .. RANKS - 1) {
      run Rank(i)
    }
    i = 0
  }
}
