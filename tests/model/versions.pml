/*
 * Which version of the weights serves: the control page of csrc/lookup/direct/control_page.cpp,
 * and who announces on it (torchrec_bls/direct/serving/versions.py). docs/design/model.md says
 * which transition stands for which line, what is left out, and why that is sound.
 *
 *   OWNERS        ranks that have tables
 *   PUBLICATIONS  of each owner: of any version, so that it skips some, is behind or ahead
 *   VERSIONS      that are published, besides the first one
 *   AGREE         1: at last every owner publishes the last version
 *   DEADLINES     1: an owner may withdraw at any time; 0: only a version that another one skipped
 *   DEATHS        of owners, at any step. A successor goes on, and knows only the page.
 *   COMPARE       0: a version serves when all owners have announced any
 *   COUNT         0: a withdrawal does not count in the word that decides
 *   RECHECK       0: a reader does not look at that word again after it has read a record
 */

#define FIRST 1
#define LAST (FIRST + VERSIONS)
#define RECORD(owner, place) ((owner) * 2 + (place))
#define SERIAL(word) ((word) / 16)
/* A word of an owner: a count of stores, the place of the record, whether that is announced. */
#define PLACE(word) ((word) / 2 % 2)
#define ANNOUNCED(word) ((word) % 2)
#define NEXT(word, place, whether) (((word) / 4 + 1) * 4 + (place) * 2 + (whether))
/* What an owner has announced for the next serial. The record that its word names is not written to
   while the word stays, and the code looks at the word again. So this may be one step. */
#define PENDING_AFTER(owner, serving) \
  (ANNOUNCED(word[owner]) && \
           serial[RECORD(owner, PLACE(word[owner]))] == SERIAL(serving) + 1 \
       -> version[RECORD(owner, PLACE(word[owner]))] \
       : 0)
#define PENDING(owner) PENDING_AFTER(owner, decided)

byte decided; /* the serial of what serves, and withdrawals since */
byte word[OWNERS];
byte serial[OWNERS * 2];
byte version[OWNERS * 2];
bool dies[OWNERS];
byte deaths;
byte read_last; /* the version that the reader has */

/* Another owner has announced something else than this one. */
#if OWNERS == 2
#define SKIPPED(own) (PENDING(1 - me) != 0 && PENDING(1 - me) != own)
#else
#define SKIPPED(own) \
  ((PENDING((me + 1) % 3) != 0 && PENDING((me + 1) % 3) != own) || \
   (PENDING((me + 2) % 3) != 0 && PENDING((me + 2) % 3) != own))
#endif

/* ControlPage::settle */
inline settle() {
  do
  :: d_step { found = decided; n = 0; agreed = 0 };
     do
     :: d_step {
          n < OWNERS ->
          if
          :: PENDING_AFTER(n, found) != 0 &&
                 (n == 0 || !COMPARE || PENDING_AFTER(n, found) == agreed) ->
             agreed = PENDING_AFTER(n, found);
             n++
          :: else -> n = OWNERS + 1
          fi
        }
     :: n >= OWNERS -> break
     od;
     atomic {
       if
       :: n == OWNERS && decided == found ->
          decided = (SERIAL(found) + 1) * 16;
          printf("version %d serves\n", agreed);
          n = OWNERS + 1
       :: else
       fi
     };
     if
     :: n > OWNERS -> break
     :: else /* the word has changed */
     fi
  od;
  atomic { n = 0; found = 0; agreed = 0 }
}

/* ControlPage::withdraw */
inline withdraw() {
  d_step {
    printf("owner %d withdraws %d\n", me, pending);
    word[me] = NEXT(word[me], PLACE(word[me]), 0)
  };
  do
  :: found = decided;
     d_step {
       if
       :: SERIAL(found) > before -> n = 1 /* it serves */
       :: SERIAL(found) <= before && decided == found -> decided = found + COUNT; n = 1
       :: else
       fi
     };
     if
     :: n == 1 -> break
     :: else
     fi
  od;
  atomic { n = 0; found = 0 }
}

/* `publish` from its first look at the page to its last */
inline publish() {
  do
  :: settle();
     d_step { pending = PENDING(me); before = SERIAL(decided) };
     if
     :: pending == wanted -> break
     :: pending == 0 && version[RECORD(me, (serial[RECORD(me, 0)] == before -> 0 : 1))] == wanted ->
        break
     :: d_step {
          pending == 0 &&
              version[RECORD(me, (serial[RECORD(me, 0)] == before -> 0 : 1))] != wanted ->
          place = (serial[RECORD(me, 0)] == before -> 1 : 0);
          serial[RECORD(me, place)] = before + 1
        };
        version[RECORD(me, place)] = wanted;
        d_step {
          printf("owner %d announces %d\n", me, wanted);
          word[me] = NEXT(word[me], place, 1)
        };
        settle();
        break
     :: pending != 0 && pending != wanted ->
        if
        :: DEADLINES || SKIPPED(pending) -> withdraw()
        :: SERIAL(decided) != before /* it serves by now */
        fi
     fi
  od
}

proctype Owner(byte me) {
  byte left = PUBLICATIONS + AGREE;
  byte wanted, pending, before, place;
  byte n, found, agreed;
again:
  {
    do
    :: left > AGREE ->
       if
       :: wanted = FIRST + 1
       :: VERSIONS > 1 -> wanted = FIRST + 2
       :: VERSIONS > 2 -> wanted = FIRST + 3
       :: wanted = 0 /* it fails, or skips one */
       fi;
       left--;
       if
       :: wanted != 0 -> publish()
       :: else
       fi
    :: left == AGREE && AGREE -> wanted = LAST; publish(); left = 0
    :: left == 0 -> break
    od
  }
  unless {
    d_step {
      dies[me] ->
      printf("owner %d dies\n", me);
      dies[me] = false;
      wanted = 0; pending = 0; before = 0; place = 0;
      n = 0; found = 0; agreed = 0
    };
    goto again
  }
}

/* The thread of an owner that follows: it makes serve what is complete, whoever announced last. */
proctype Follower() {
  byte n, found, agreed;
end:
  do
  :: PENDING(0) != 0 && PENDING(0) == PENDING(1) &&
         PENDING(OWNERS - 1) == PENDING(0) ->
     settle()
  od
}

proctype Reader() {
  byte n, now, place;
  byte view[OWNERS];
  byte reads; /* a serial */
end:
  do
  :: d_step { SERIAL(decided) != reads -> now = SERIAL(decided); n = 0 };
     do
     :: n < OWNERS ->
        d_step {
          if
          :: serial[RECORD(n, 0)] == now -> place = 0
          :: serial[RECORD(n, 0)] != now && serial[RECORD(n, 1)] == now -> place = 1
          :: else -> n = OWNERS + 1 /* overtaken */
          fi
        };
        if
        :: d_step {
             n < OWNERS ->
             if
             :: !RECHECK || (serial[RECORD(n, place)] == now && SERIAL(decided) <= now) ->
                view[n] = version[RECORD(n, place)];
                n++
             :: else -> n = OWNERS + 1
             fi
           }
        :: n >= OWNERS
        fi
     :: n >= OWNERS -> break
     od;
     atomic {
       if
       :: n == OWNERS ->
          for (n : 1 .. OWNERS - 1) {
            if
            :: view[n] != view[0] ->
               printf("a batch has version %d of owner 0 and version %d of owner %d\n", view[0],
                      view[n], n);
               assert(false)
            :: else
            fi
          }
          reads = now;
          read_last = view[0]
       :: else
       fi;
       now = 0; place = 0; n = 0;
       view[0] = 0; view[1] = 0; view[OWNERS - 1] = 0
     }
  od
}

proctype Killer() {
  do
  :: d_step { deaths < DEATHS -> deaths++; dies[0] = true }
  :: d_step { deaths < DEATHS -> deaths++; dies[1] = true }
  :: deaths == DEATHS -> break
  :: break
  od
}

init {
  atomic {
    byte i;
    decided = 16;
    for (i : 0 .. OWNERS - 1) {
      serial[RECORD(i, 1)] = 1;
      version[RECORD(i, 1)] = FIRST;
      word[i] = NEXT(0, 1, 1)
    }
    for (i : 0 .. OWNERS - 1) {
      run Owner(i)
    }
    i = 0;
    run Reader();
#if DEATHS
    run Follower();
    run Killer()
#endif
  };
#if AGREE
  /* All owners have published the last version, and nothing more can happen. */
  timeout;
  d_step {
    if
    :: read_last != LAST ->
       printf("all have published version %d, and version %d serves\n", LAST, read_last);
       assert(false)
    :: else
    fi
  }
#endif
}
